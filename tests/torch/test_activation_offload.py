"""Activations on the host: the formulas against TRL's own hooks and torch's, run by the trace."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from memfit.job import Job
from memfit.lower import lower
from memfit.measure.child import run
from memfit.measure.record import Case
from memfit.measure.run import recorded
from memfit.model.families import build
from memfit.simulate.memory import memory
from memfit.simulate.pinned_memory import parked
from memfit.strategy import DDP, Strategy
from memfit.tape import Comm, Tape, check
from memfit.trace import trace_config

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL, transformers and PEFT
LLAMA = {
    "model_type": "llama",
    "vocab_size": 4000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
TRL, WRAPPER, ALL = (
    {"framework": "trl", "activation_offload": "streams"},
    {"activation_offload": "wrapper"},
    {"activation_offload": "all"},
)
FULL, LORA, REENTRANT = (
    {"checkpointing": "full"},
    {"method": "lora"},
    {"checkpointing": "full", "reentrant": True},
)
PHI3, MIXTRAL = (
    {"model_type": "phi3", "pad_token_id": 0},
    {"model_type": "mixtral", "num_local_experts": 4},
)
GEMMA2 = {"model_type": "gemma2", "head_dim": 64}
OWN: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({}, FULL),
    ({}, REENTRANT),
    ({}, LORA),
    ({}, LORA | FULL),
    ({}, LORA | REENTRANT),
    ({}, {"method": "qlora"} | FULL),
    ({}, {"precision": "autocast-bf16"}),
    (PHI3, LORA),
    (MIXTRAL, {}),
    (GEMMA2, {"attention": "eager"}),
    ({}, {"checkpointing": "selective"}),
    ({}, FULL | {"accumulate": 2}),
    ({}, LORA | {"packing": False, "optimizer": "adamw_8bit"}),
    ({}, {"longest": 512, "evaluate": True}),
)
TORCHS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, WRAPPER),
    ({}, WRAPPER | FULL),
    ({}, WRAPPER | REENTRANT | LORA),
    (PHI3, WRAPPER | {"method": "qlora"}),
    (GEMMA2, WRAPPER | {"accumulate": 2}),
    ({}, ALL | {"precision": "autocast-bf16", "keep_outputs": True}),
    ({}, ALL | FULL | LORA),
    (MIXTRAL, ALL | {"evaluate": True}),
)


def both(config: dict[str, Any], options: dict[str, Any], **more: Any) -> tuple[Tape, Tape]:
    job = Job(**{"batch": 2, "seq": 256, "optimizer": "sgd", **options})
    ours = lower(build({**LLAMA, **config}), job, **more)
    check(ours)
    return ours, trace_config({**LLAMA, **config}, job, **more)


def copied(tape: Tape, op: str) -> int:
    return sum(
        event.size
        for event in tape
        if type(event) is Comm and event.group == "host" and event.op == op
    )


def held(ours: Tape, theirs: Tape) -> None:
    assert memory(ours).allocated == pytest.approx(memory(theirs).allocated, rel=0.001)
    for op in ("to_host", "to_device"):
        assert copied(ours, op) == pytest.approx(copied(theirs, op), rel=0.001)
    assert parked(ours) == pytest.approx(parked(theirs), rel=0.01)


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize(("config", "options"), OWN, ids=str)
def test_formulas_equal_trls_own_hooks(config: dict[str, Any], options: dict[str, Any]) -> None:
    trl = pytest.importorskip("trl", minversion="1.7", exc_type=ImportError)
    told = {"versions": "trl=" + ".".join(trl.__version__.split(".")[:2])}
    held(*both(config, {**TRL, **told, **options}))


@pytest.mark.parametrize(("config", "options"), TORCHS, ids=str)
def test_formulas_equal_torchs_own_hooks(config: dict[str, Any], options: dict[str, Any]) -> None:
    held(*both(config, options))


def test_replicas() -> None:
    held(*both({}, WRAPPER | FULL, strategy=Strategy(ddp=DDP(size=4))))


def test_real_steps_have_the_hooks_too() -> None:
    """On the CPU, where what leaves stays on the same side, copies and all."""
    config = {
        **LLAMA,
        "hidden_size": 64,
        "intermediate_size": 160,
        "vocab_size": 512,
        "num_hidden_layers": 2,
    }
    cases = [
        Case(model="any", config=config, job=Job(batch=2, seq=32, activation_offload=kind))
        for kind in ("none", "all")
    ]
    none, away = (recorded(case, run(case, "cpu", None), 1.0) for case in cases)
    assert none.allocated is not None
    assert away.allocated is not None
    assert away.allocated > 1.1 * none.allocated
