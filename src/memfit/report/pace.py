"""How long a step takes, in words and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memfit.estimate import Estimate
from memfit.simulate.time import Duration

# (path, type, meaning), as in `codec.FIELDS`.
TIME: tuple[tuple[str, str, str], ...] = (
    ("time", "object?", "of one optimizer step, by what kernels were measured to reach; null where that is not known (inference, a trace)"),
    ("time.seconds", "number", "the step"),
    ("time.tokens_per_second", "number", "batch, sequence and accumulation over the step"),
    ("time.mfu", "number", "model flops utilization: the model's own arithmetic over what the GPU could do in that time"),
    ("time.hfu", "number", "hardware flops utilization: the same of all that is computed, again or not"),
    ("time.model_flops", "number", "of the step, the backward counted twice the forward, nothing computed again"),
    ("time.flops", "number", "all that is computed"),
    ("time.parts", "{}number", "seconds: matmul, attention, memory (kernels that only move bytes), optimizer, communication, host (copies, optimizer), bubble"),
    ("time.kernels", "integer", "that are launched in the step"),
    ("time.measured", "boolean", "on this GPU, not on one of its kind"),
    ("time.origin", "string", "whose kernels"),
)  # fmt: skip


def pace(estimate: Estimate) -> Iterator[str]:
    time = estimate.time
    if time is None:
        return
    of = f"{100 * time.mfu:.0f} % of the GPU's arithmetic"
    yield f"a step takes {duration(time.seconds)}: {time.tokens_per_second:,.0f} tokens/s, {of}"
    shares = [f"{kind} {100 * seconds / time.seconds:.0f} %" for kind, seconds in time.parts.items() if seconds * 200 > time.seconds]
    yield "  " + ", ".join(shares) + ("" if time.measured else "; by a GPU of its kind")


def duration(seconds: float) -> str:
    """`840 ms`, `1.39 s`, `4.2 min`."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:.3g} h"


def time_dict(time: Duration | None) -> dict[str, Any] | None:
    if time is None:
        return None
    names = [path.partition(".")[2] for path, _, _ in TIME if "." in path]
    return {name: dict(time.parts) if name == "parts" else getattr(time, name) for name in names}
