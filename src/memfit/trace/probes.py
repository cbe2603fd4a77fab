"""Runs a class of transformers on fake tensors with one field of its config changed, and says what
that changes: nothing, shapes, rates of dropout, or the operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memfit.errors import InputError
from memfit.job import Job
from memfit.trace.capture import Call, Run, forward_of

Change = Literal["nothing", "shapes", "rates", "code", "fails"]
BATCH, SEQ, TARGET = 2, 40, 24


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one forward pass did, as far as memory is concerned."""

    code: tuple[Any, ...]
    shapes: tuple[Any, ...]
    rates: tuple[Any, ...]
    run: Run


def seen(
    config: Mapping[str, Any], head: str, seq: int = SEQ, batch: int = BATCH, target: int = TARGET
) -> Seen | str:
    """One pass, or why there is none. `target`: tokens of a decoder beside an encoder."""
    target = target if head == "seq2seq-lm" else 0
    precision = precision_of(config)
    job = Job(
        task="pretrain", batch=batch, seq=seq, head=head, target_seq=target, precision=precision
    )
    try:
        run = forward_of(dict(config), job)
    except InputError as bad:
        return bad.problems[0].message
    except Exception as bad:  # noqa: BLE001 - a class that fails on a config may raise anything
        return f"{type(bad).__name__}: {str(bad)[:200]}"
    calls = [one for one in run.log if isinstance(one, Call)]
    ends = tuple(isinstance(one, Call) for one in run.log)  # when something is let go
    weights = [(one.name, one.module, one.buffer) for one in run.weights]
    return Seen(
        code=(tuple((one.name, one.where, attributes(one)) for one in calls), ends, weights),
        shapes=(
            tuple(tuple((out.shape, out.strides) for out in one.outputs) for one in calls),
            tuple((one.shape, one.format) for one in run.weights),
        ),
        rates=tuple(one.attrs.get("p") for one in calls),
        run=run,
    )


def precision_of(config: Mapping[str, Any]) -> str:
    """What a small model is run in: bf16, but for classes that run in fp32 alone."""
    return "fp32" if config.get("dtype") == "float32" else "bf16"


def attributes(call: Call) -> tuple[Any, ...]:
    """What a call is told beside its operands, without rates, and without the number of groups of a
    convolution, which may be a size (Nystromformer has as many as heads)."""
    told = sorted(call.attrs.items())
    return tuple((key, str(value)) for key, value in told if key not in ("p", "groups"))


def change(before: Seen, after: Seen | str) -> Change:
    """What differs between two passes, the gravest first."""
    if isinstance(after, str):
        return "fails"
    if before.code != after.code:
        return "code"
    if before.shapes != after.shapes:
        return "shapes"
    return "rates" if before.rates != after.rates else "nothing"


__all__ = ["TARGET", "Change", "Seen", "change", "precision_of", "seen"]
