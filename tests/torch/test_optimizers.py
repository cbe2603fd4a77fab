"""Every optimizer that torch, transformers and PEFT offer by name: answered by both producers
alike, and true to real steps on the CPU."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.conformance.grid import Case, compare, height, holds  # noqa: E402
from tests.torch.real_steps import Changes, split, traced  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

from memfit.errors import InputError  # noqa: E402
from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.optimizers import OPTIMIZERS, REFUSED  # noqa: E402
from memfit.simulate.memory import memory  # noqa: E402
from memfit.tape import Tape  # noqa: E402
from memfit.trace import trace_config  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2000,
    "max_position_embeddings": 64,
}
ALIASES = {"adafactor": "adafactor_torch", "sparseadam": "sparse_adam"}


def missing(name: str) -> str:
    """The package that the trace needs for it, where that is not here."""
    from memfit.trace.optimizers import PACKAGES, makers

    module, package = PACKAGES.get(name.partition("_")[0], ("torch", ""))
    return package if makers()[name].__name__ == "by_trainer" and find_spec(module) is None else ""


# ------------------------------------------------------------------------------------------- names
def test_every_name_of_torch_has_an_answer_or_a_reason() -> None:
    classes = [
        one
        for one in vars(torch.optim).values()
        if inspect.isclass(one)
        and issubclass(one, torch.optim.Optimizer)
        and one is not torch.optim.Optimizer
    ]
    names = {ALIASES.get(one.__name__.lower(), one.__name__.lower()) for one in classes}
    assert len(names) > 12
    assert {name for name in names if name not in OPTIMIZERS and name not in REFUSED} == set()


def test_every_name_of_transformers_has_an_answer_or_a_reason() -> None:
    from transformers.training_args import OptimizerNames

    assert {
        one.value
        for one in OptimizerNames
        if one.value not in OPTIMIZERS and one.value not in REFUSED
    } == set()


def test_every_name_of_peft_has_an_answer() -> None:
    optimizers = pytest.importorskip("peft.optimizers")
    names = {
        found[1]
        for found in (re.fullmatch(r"create_(\w+)_optimizer", name) for name in dir(optimizers))
        if found
    }
    assert names >= {"loraplus", "lorafa"}
    assert {name for name in names if name not in OPTIMIZERS} == set()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_answered_is_said(name: str) -> None:
    with pytest.raises(InputError) as bad:
        Job(optimizer=name)
    assert [problem.message for problem in bad.value.problems] == [REFUSED[name]]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"optimizer": "lorafa"}, "for adapters"),
        (
            {"optimizer": "apollo_adamw_layerwise", "accumulate": 2},
            "` steps during the backward pass and cannot accumulate gradients",
        ),
    ],
)
def test_what_does_not_go_with_the_rest_is_said(job: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as bad:
        Job(**job)
    assert [problem.where for problem in bad.value.problems] == ["job.optimizer"]
    assert message in bad.value.problems[0].message


def test_stacks_of_experts_are_too_much_for_adalomo() -> None:
    moe = {**CONFIG, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(InputError, match="three dimensions"):
        lower(build(moe), Job(optimizer="adalomo", batch=1, seq=16))


@pytest.mark.skipif(not missing("galore_adamw"), reason="galore-torch is here")
def test_a_package_that_is_not_installed_is_said() -> None:
    with pytest.raises(InputError, match="galore-torch") as bad:
        trace_config(CONFIG, Job(optimizer="galore_adamw", batch=1, seq=16))
    assert "pip install galore-torch" in bad.value.problems[0].hint


@pytest.mark.parametrize(
    "job",
    [
        {"precision": "bf16-master", "batch": 2, "seq": 64},
        {"precision": "bf16-master", "optimizer": "adamw_fused", "clip": 1.0, "accumulate": 2},
        {"method": "lora", "merge": True, "optimizer": "sgd", "rank": 64},
        {"method": "lora", "merge": True, "adapter_dtype": "base", "evaluate": True},
    ],
    ids=str,
)
def test_what_stands_beside_an_optimizer(job: dict[str, Any]) -> None:
    """fp32 copies of training method, and adapters merged when all is over: the peak, and the last
    moment's."""
    options = Job(**{"batch": 1, "seq": 16, **job})
    found = compare(Case(family="llama", name=str(job), config=CONFIG, job=options))
    assert found is not None
    assert holds(found) == []
    phase = "save" if options.merge else "step"
    ours, real = (
        height(memory(tape), phase)
        for tape in (lower(build(CONFIG), options), trace_config(CONFIG, options))
    )
    assert real > 0
    assert abs(ours - real) <= 0.001 * real


# ------------------------------------------------------------------------ formulas beside the code
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_formulas_equal_the_real_code(name: str) -> None:
    if package := missing(name):
        pytest.skip(f"needs {package}")
    job = Job(
        optimizer=name, batch=1, seq=16, method="lora" if OPTIMIZERS[name].adapters else "full"
    )
    found = compare(Case(family="llama", name=name, config=CONFIG, job=job))
    assert found is not None
    assert holds(found) == []


@pytest.mark.parametrize(
    "name", ["adafactor_torch", "muon", "rprop", "apollo_adamw", "galore_adamw"]
)
def test_formulas_equal_the_real_code_in_fp32_and_with_adapters(name: str) -> None:
    if package := missing(name):
        pytest.skip(f"needs {package}")
    for more in ({"precision": "fp32"}, {"method": "lora", "rank": 32}):
        found = compare(
            Case(
                family="llama",
                name=name,
                config=CONFIG,
                job=Job(optimizer=name, batch=1, seq=16, **more),
            )
        )
        assert found is not None
        assert holds(found) == []


# --------------------------------------------------------------------------- real steps on the CPU
SHAPES = ((3000, 400), (400,), (1200, 400), (400, 1200), (1200,))
Make = Callable[[list[Any]], Any]


def real(make: Make, shapes: tuple[tuple[int, ...], ...]) -> Changes:
    """The second step of an optimizer over parameters alone, under the profiler."""
    with (
        torch.backends.mkldnn.flags(enabled=False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        parameters = [torch.nn.Parameter(torch.rand(shape)) for shape in shapes]
        optimizer = make(parameters)
        for step in range(2):
            if step:
                with record_function("first step"):
                    pass
            for one in parameters:
                one.grad = torch.ones_like(one)
            optimizer.step()
            optimizer.zero_grad()
    return split(profiler, 0)


def recorded(make: Make, shapes: tuple[tuple[int, ...], ...]) -> Changes:
    """The same step under the trace, told to act as a CPU."""
    from memfit.trace import cuda, kernels_of
    from memfit.trace.recorder import Recorder

    device = cuda.Device(
        type="cpu", name="CPU", version=tuple(int(one) for one in torch.__version__.split(".")[:2])
    )
    kernels_of.install(device)
    recorder = Recorder(device)
    with cuda.pretended(device), recorder:
        parameters = [torch.nn.Parameter(torch.empty(shape, device="cpu")) for shape in shapes]
        optimizer = make(parameters)
        for step in range(2):
            recorder.mark("step" if not step else "prepare", step=step)
            for one in parameters:
                one.grad = torch.ones_like(one)
            optimizer.step()
            optimizer.zero_grad()
    return traced(Tape(events=recorder.finished(), source="trace"))


def rise(changes: Changes) -> int:
    return changes.peak - changes.before


OPTIM = torch.optim
REAL: dict[str, Make] = {
    **{
        f"{kind} foreach={lists}": lambda trained, kind=kind, lists=lists: getattr(OPTIM, kind)(
            trained, foreach=lists
        )  # type: ignore[misc]
        for kind in (
            "Adadelta",
            "Adagrad",
            "Adam",
            "AdamW",
            "Adamax",
            "NAdam",
            "RAdam",
            "RMSprop",
            "Rprop",
            "ASGD",
            "SGD",
            "Adafactor",
        )
        for lists in (False, True)
    },
    **{
        f"{kind} fused": lambda trained, kind=kind: getattr(OPTIM, kind)(trained, fused=True)
        for kind in ("Adam", "AdamW", "SGD", "Adagrad")
    },  # type: ignore[misc]
    "SGD momentum": lambda trained: OPTIM.SGD(trained, momentum=0.9),
    "Muon": lambda trained: OPTIM.Muon([one for one in trained if one.ndim == 2]),
}
UNLISTED = {"Adafactor foreach=True"}  # its CPU kernels take scratch that a GPU does not


@pytest.mark.parametrize("name", sorted(set(REAL) - UNLISTED))
def test_a_real_step_holds_as_much(name: str) -> None:
    """Scalars and scratch of CPU kernels aside."""
    found, truth = rise(recorded(REAL[name], SHAPES)), rise(real(REAL[name], SHAPES))
    assert truth > 0
    assert abs(found - truth) <= 0.002 * sum(4 * one for one in map(size, SHAPES))


def size(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)
