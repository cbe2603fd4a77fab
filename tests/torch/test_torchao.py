"""torchao's compiled optimizers, really run on a CPU: what their step holds is what memfit says.
Needs torchao, which no other test does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao", minversion="0.16", exc_type=ImportError)

from torch.profiler import ProfilerActivity, profile  # noqa: E402

from memfit.optimizers import OPTIMIZERS  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SIDE = 1024
WIDTHS = {"fp32": 4, "int64": 8}


def step_of(name: str) -> int:
    """Bytes a value that the step of the table of optimizers makes."""
    return sum(
        WIDTHS[word.rpartition(":")[2]]
        for word in OPTIMIZERS[name].rules[0].step.strip("{}").split()
        if ":" in word
    )


@pytest.mark.parametrize(
    ("name", "real", "more"),
    [("adamw_torch_8bit", "AdamW8bit", 0.1), ("adamw_torch_4bit", "AdamW4bit", 2.1)],
)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_what_a_step_holds(name: str, real: str, more: float, kind: str) -> None:
    """`more`: scales, and the codes of 4 bits unpacked, which a CPU's kernels make apart."""
    import torchao.optim

    weight = torch.nn.Parameter(torch.randn(SIDE, SIDE, dtype=getattr(torch, kind)))
    optimizer: Any = getattr(torchao.optim, real)([weight], block_size=256)
    for _ in range(2):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    weight.grad = torch.randn_like(weight)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        optimizer.step()
    events = [
        (one.start_ns(), one.nbytes())
        for one in profiler.profiler.kineto_results.events()
        if one.name() == "[memory]"
    ]
    peak = max(itertools.accumulate(size for _, size in sorted(events, key=lambda one: one[0])))
    assert step_of(name) <= peak / SIDE**2 <= step_of(name) + more
