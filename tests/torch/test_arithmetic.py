"""The arithmetic of a step, which MFU and HFU rest on, against torch's own counter of it
(torch/utils/flop_counter.py) over transformers' real code, and the kernels of a token, which the
time of small batches rests on, against what torch's dispatcher is asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.torch.real_steps import Loop, adapted, built, train  # noqa: E402
from tests.torch.small import CONFIGS, MODELS  # noqa: E402
from tests.torch.test_trace_truth import MODES  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from memfit.api.verbs import estimate  # noqa: E402
from memfit.hardware import parse_cluster  # noqa: E402
from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build, families  # noqa: E402
from memfit.strategy import Strategy  # noqa: E402
from memfit.tape import Compute, Mark, Tape  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)
FAMILY = sorted(
    name
    for name, config in CONFIGS.items()
    if config["model_type"] in families()
    and build(dict(config), name=name).graphs is None  # eager attention has no captured graphs
)
VIEWS = frozenset(
    {
        "view",
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "detach",
        "alias",
        "_unsafe_view",
        "split",
        "split_with_sizes",
        "empty",
        "empty_like",
    }
)
MODE = ("full", "reentrant", "lora", "frozen", "selective", "accumulated")


def grouped(given: tuple[int, ...], weight: tuple[int, ...], *others: Any, **more: Any) -> int:
    """Each token with its expert's matrix: torch's counter does not know this operator."""
    return 2 * given[-2] * given[-1] * weight[-1]


def counted(name: str, mode: str) -> int:
    small, told = MODELS[name], dict(MODES[mode].loop)
    if "lora" in told:
        told["lora"] = told["lora"] | small.lora
    loop = Loop(**{"steps": 1, "attention": "eager"} | told)
    model = adapted(built(small, loop), loop)
    trained = [one for one in model.parameters() if one.requires_grad]
    with FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped}
    ) as counter:
        train(model, trained, torch.optim.SGD(trained, lr=0.0), small, loop)
    return counter.get_total_flops()


@cache
def tape(name: str, mode: str, versions: str = "") -> Tape:
    options = {
        "batch": 2,
        "seq": 64,
        "attention": "eager",
        "precision": "fp32",
        "optimizer": "sgd",
        "versions": versions,
    }
    job = Job(**options | MODES[mode].job | MODELS[name].options)
    return lower(
        build(dict(MODELS[name].config), name=name),
        job,
        Strategy(),
        parse_cluster("1xa100-sxm-80gb"),
    )


def said(events: Tape) -> int:
    total, step = 0, 0
    for event in events:
        if type(event) is Mark:
            step = event.step
        elif type(event) is Compute and step == 1:
            total += event.flops
    return total


@pytest.mark.parametrize("name", FAMILY)
def test_a_checkpointed_step_computes_what_torch_counts(name: str) -> None:
    """Forward, backward, and what is computed again, which ends before a layer's last product where
    nothing behind that is kept."""
    assert said(tape(name, "checkpointed")) == counted(name, "checkpointed")


@pytest.mark.parametrize("mode", MODE)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_every_way_of_training_computes_what_torch_counts(name: str, mode: str) -> None:
    assert said(tape(name, mode)) == counted(name, mode)


def test_before_torch_2_1_a_checkpoint_runs_to_its_end() -> None:
    """Two layers' last product more: 2 · 128 tokens · 128 · 64 each."""
    assert (
        said(tape("llama", "checkpointed", "torch=2.0")) - said(tape("llama", "checkpointed"))
        == 2 * 2 * 128 * 128 * 64
    )
    assert said(tape("llama", "checkpointed", "torch=2.0")) == said(tape("llama", "reentrant"))


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "phi3", "olmo2", "gpt2", "gpt_neox", "opt"]
)
def test_a_layer_launches_as_many_kernels_a_token_as_torch_is_asked_for(name: str) -> None:
    """Of a token's pass in bf16 with a cache, between models of two layers and of four; operators
    that only look at memory otherwise launch nothing."""
    (two, ours), (four, more) = (launched(layered(name, layers)) for layers in (2, 4))
    assert four - two == more - ours


def layered(name: str, layers: int) -> Any:
    key = "n_layer" if "n_layer" in CONFIGS[name] else "num_hidden_layers"
    return replace(MODELS[name], config={**CONFIGS[name], key: layers})


def launched(small: Any) -> tuple[int, int]:
    """By torch's dispatcher, and by memfit."""
    model, calls = built(small, Loop(dtype="bfloat16", attention="sdpa")).eval(), Calls()
    with torch.no_grad():
        cache = model(torch.full((1, 16), 5), use_cache=True).past_key_values
        with calls:
            model(torch.full((1, 1), 5), past_key_values=cache, use_cache=True)
    found = estimate(
        dict(small.config),
        gpu="a100-sxm-80gb",
        task="inference",
        batch=1,
        seq=16,
        new_tokens=4,
        precision="bf16",
    )
    assert found.generation is not None
    return calls.count, found.generation.kernels


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.removeprefix("aten::") not in VIEWS
        return func(*args, **(kwargs or {}))
