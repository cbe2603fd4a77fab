"""How long a step takes, in words and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memfit.estimate import Estimate
from memfit.report.figures import digits
from memfit.simulate.bill import Bill
from memfit.simulate.generating import Generation
from memfit.simulate.time import Duration

# (path, type, meaning), as in `codec.FIELDS`.
TIME: tuple[tuple[str, str, str], ...] = (
    (
        "time",
        "object?",
        ("time of one optimizer step, from measured kernels; null if unknown (inference, trace)"),
    ),
    ("time.seconds", "number", "the step"),
    ("time.tokens_per_second", "number", "batch × sequence × accumulation over the step"),
    (
        "time.mfu",
        "number",
        ("model FLOPS utilization: the model's own FLOPs over the GPU's peak"),
    ),
    (
        "time.hfu",
        "number",
        ("hardware FLOPS utilization: all FLOPs, with recomputation, over the GPU's peak"),
    ),
    (
        "time.model_flops",
        "number",
        (
            "FLOPs of the step; the backward counts twice the forward (once for "
            "frozen weights), without recomputation"
        ),
    ),
    ("time.flops", "number", "all FLOPs"),
    (
        "time.parts",
        "{}number",
        (
            "seconds: matmul, attention, memory (bandwidth-bound), optimizer, "
            "communication, bubble, host (copies, optimizer), launch (waits)"
        ),
    ),
    ("time.kernels", "integer", "kernels launched in the step"),
    ("time.measured", "boolean", "true if measured on this GPU, false if on a similar one"),
    ("time.origin", "string", "source of the kernels"),
    (
        "bill",
        "object?",
        (
            "of the dataset, in full steps; null without `--dataset-tokens` or "
            "`--examples`, or without a time"
        ),
    ),
    ("bill.steps", "integer", "optimizer steps, the last one full"),
    ("bill.tokens", "integer", "of all of them"),
    ("bill.hours", "number", "on the clock"),
    ("bill.gpu_hours", "number", "on all GPUs"),
    (
        "bill.energy",
        "number?",
        ("kWh of the GPU boards at their power limit, without hosts, switches and cooling"),
    ),
    (
        "bill.money",
        "number?",
        "dollars, at `--price` or the public price",
    ),
    (
        "untimed",
        "string?",
        "why `time` and `generation` are unknown; null if they are known",
    ),
    (
        "generation",
        "object?",
        "of all new tokens; null if unknown or nothing is generated",
    ),
    ("generation.seconds", "number", "from the prompt to the last token"),
    ("generation.prefill", "number", "time to first token in seconds"),
    ("generation.token", "number", "mean time per output token in seconds"),
    (
        "generation.waiting",
        "number",
        "seconds of it that the GPU waits for kernel launches",
    ),
    ("generation.tokens_per_second", "number", "new tokens of all sequences"),
    ("generation.kernels", "integer", "kernels launched per token"),
    ("generation.measured", "boolean", "true if measured on this GPU, false if on a similar one"),
    ("generation.origin", "string", "source of the kernels"),
)


def pace(estimate: Estimate) -> Iterator[str]:
    time = estimate.time
    if why := estimate.untimed:
        yield f"time is not known: {why}"
    if time is None:
        yield from generating(estimate.generation)
        return
    of = f"{100 * time.mfu:.0f} % of the GPU's peak FLOPS (MFU)"
    took = duration(time.seconds)
    yield f"time per step {took}: {time.tokens_per_second:,.0f} tokens/s, {of}"
    shares = [
        f"{kind} {100 * seconds / time.seconds:.0f} %"
        for kind, seconds in time.parts.items()
        if seconds * 200 > time.seconds
    ]
    yield "  " + ", ".join(shares) + ("" if time.measured else "; estimated from similar GPUs")
    if (whole := estimate.bill) is not None:
        told = [f"{whole.gpu_hours:,.4g} GPU hours"] if whole.gpu_hours != whole.hours else []
        told += (
            []
            if whole.energy is None
            else [f"{whole.energy:,.3g} kWh of the boards at their limit"]
        )
        told += ["price unknown"] if whole.money is None else [f"${whole.money:,.2f}"]
        yield (
            f"{whole.tokens:,} tokens in {whole.steps:,} steps take "
            f"{duration(3600 * whole.hours)}: {', '.join(told)}"
        )


def generating(found: Generation | None) -> Iterator[str]:
    if found is None:
        return
    what = f"{found.new_tokens:,} new tokens take" if found.new_tokens else "a forward pass takes"
    source = "" if found.measured else ", estimated from similar GPUs"
    rate = f"{digits(found.tokens_per_second)} tokens/s"
    yield f"{what} {duration(found.seconds)}: {rate}{source}"
    if not found.new_tokens:
        return
    waits = (
        f", {duration(found.waiting)} of it for kernel launches"
        if found.waiting > found.token / 20
        else ""
    )
    first, each = duration(found.prefill), duration(found.token)
    yield f"  time to first token {first}, time per output token {each}{waits}"


def duration(seconds: float) -> str:
    """`840 ms`, `1.39 s`, `4.2 min`."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return (
        f"{seconds:.3g} s"
        if seconds < 100
        else f"{seconds / 60:.3g} min"
        if seconds < 6000
        else f"{seconds / 3600:.3g} h"
    )


def time_dict(estimate: Estimate) -> dict[str, Any]:
    return {
        "time": told("time", estimate.time),
        "bill": told("bill", estimate.bill),
        "untimed": estimate.untimed or None,
        "generation": told("generation", estimate.generation),
    }


def told(name: str, found: Duration | Generation | Bill | None) -> dict[str, Any] | None:
    keys = [path.partition(".")[2] for path, _, _ in TIME if path.startswith(f"{name}.")]
    return (
        None
        if found is None
        else {
            key: dict(value) if isinstance(value := getattr(found, key), Mapping) else value
            for key in keys
        }
    )
