"""Layouts over many GPUs: the formulas' rank beside the traced one, real wrappers under a process group that sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

from tests.conformance.models import SMALL  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.simulate.memory import memory  # noqa: E402
from memfit.simulate.replay import replay  # noqa: E402
from memfit.strategy import strategy_from  # noqa: E402

CONFIGS = {name: SMALL[name] for name in ("llama", "qwen2", "gpt2")}
MIXED = "param-dtype=bf16,reduce-dtype=fp32"
USES = (
    "fsdp=8", "fsdp=8,wrap=layers", f"fsdp=64,{MIXED}", f"fsdp=8,wrap=layers,{MIXED}", "fsdp=8,reduce-dtype=fp32", "fsdp=8,reshard=no", "fsdp=8,reshard-to=2",
    "fsdp=3", "fsdp=4 ddp=2", f"fsdp=4,wrap=layers,{MIXED} ddp=2", "fsdp=8,sync=no", f"fsdp=8,sync=no,{MIXED}", "fsdp=8,prefetch=2", "fsdp=8,wrap=none",
    "ddp=8", "ddp=8,bucket-mb=1", "ddp=8,bucket-view", "ddp=8,static-graph", "ddp=8,find-unused",
)  # fmt: skip
JOBS: tuple[dict[str, Any], ...] = (
    {}, {"checkpointing": "full"}, {"precision": "autocast-bf16", "checkpointing": "full", "accumulate": 2}, {"method": "lora"},
    {"method": "lora", "checkpointing": "full", "optimizer": "adamw_fused", "clip": 1.0}, {"precision": "fp32", "optimizer": "sgd"},
    {"checkpointing": "full", "reentrant": True},
    {"checkpointing": "full", "optimizer": "adamw_loop", "evaluate": True}, {"precision": "fp32", "accumulate": 2, "zero_grad": "before_backward"},
)  # fmt: skip


STRIDES = (0, 3, 5)
# Before it is reduced, the trace takes a gradient for something that passes.
PARTS = (("weights",), ("optimizer",), ("communication",), ("logits",), ("gradients", "activations", "temporaries"))


def cases() -> Iterator[Any]:
    """Every layout meets some of the jobs, its neighbours others, the families in turn; a few run at once, the others with the slow ones."""
    index = 0
    for place, use in enumerate(USES):
        for stride in STRIDES:
            options = JOBS[(place + stride) % len(JOBS)]
            if "static-graph" in use and options.get("accumulate", 1) > 1:
                options = {}
            index += 1
            name = tuple(CONFIGS)[index % len(CONFIGS)]
            told = " ".join(f"{key}={value}" for key, value in options.items()) or "plain"
            marks = [] if index % 6 == 0 else [pytest.mark.slow]
            yield pytest.param(
                name, use, options, index % 2 == 0, id=f"{name} {use} {told} {'last' if index % 2 == 0 else 'first'}", marks=marks
            )


@pytest.mark.parametrize(("name", "use", "options", "last"), list(cases()))
def test_a_layout(name: str, use: str, options: dict[str, Any], last: bool) -> None:
    """The first rank, or the last."""
    from memfit.trace import trace_config

    config, job, strategy = CONFIGS[name], Job(**{"batch": 2, "seq": 128, **options}), strategy_from(use.split(), None)
    strategy = replace(strategy, rank=strategy.ranks - 1 if last else 0)
    traced, written = trace_config(config, job, strategy=strategy), lower(build(config), job, strategy)
    truth, found = memory(traced), memory(written)
    assert abs(found.allocated - truth.allocated) <= 0.005 * truth.allocated, (found.parts, truth.parts)
    for parts in PARTS:
        said, seen = (sum(one.parts.get(part, 0) for part in parts) for one in (found, truth))
        assert abs(said - seen) <= 0.01 * truth.allocated, (found.parts, truth.parts)
    held, reserved = replay(written).peak_reserved, replay(traced).peak_reserved
    assert abs(held - reserved) <= max(0.02 * reserved, 4 * 2**20), (held, reserved)
