"""A whole run over texts of real lengths as text: its memory over time, the probability of running
out of memory, and what would change that."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from memfit.answers import COMPARED, Checkpoints, RunChange, RunStep, WholeRun
from memfit.estimate import Estimate
from memfit.report.figures import bar, gib
from memfit.report.pace import duration

# (path, type, meaning), as in `codec.FIELDS`.
RUN: tuple[tuple[str, str, str], ...] = (
    ("run", "object?", "a run over real lengths; null without `--lengths`"),
    ("run.texts", "object", "the dataset, in tokens"),
    ("run.texts.origin", "string", "what was read or drawn"),
    ("run.texts.total", "integer", "number of texts"),
    ("run.texts.mean", "number", "mean length"),
    ("run.texts.median", "integer", "median length"),
    ("run.texts.p99", "integer", "99 % of the texts are shorter"),
    ("run.texts.longest", "integer", "the longest text, before it is cut"),
    ("run.texts.limit", "integer", "texts are cut at this length (`--seq`)"),
    ("run.texts.cut", "number", "share of the texts that are cut"),
    ("run.texts.empty", "integer", "texts without a token, which are left out"),
    ("run.order", "string", "order of the texts"),
    ("run.seed", "integer", "its seed"),
    ("run.epoch", "integer", "steps of one epoch"),
    ("run.steps", "integer", "steps that are replayed"),
    ("run.curve", "[]object", "the replayed order, at most 101 of its steps"),
    ("run.curve[].step", "integer", "step, from 1"),
    ("run.curve[].tokens", "integer", "tokens per sequence of its longest batch"),
    ("run.curve[].allocated", "integer", "allocated peak of the step"),
    ("run.curve[].reserved", "integer", "reserved memory after the step"),
    ("run.worst", "object", "the longest batch of the replayed order"),
    ("run.worst.step", "integer", "its step, from 1"),
    ("run.worst.tokens", "integer", "its tokens per sequence"),
    ("run.worst.line", "integer", "line of its longest text in the file; 0 if unknown"),
    ("run.worst.allocated", "integer", "allocated peak of the step"),
    ("run.evaluation", "integer?", "allocated peak of the evaluations; null without them"),
    ("run.reserved", "integer", "reserved memory at the end, on a GPU without a limit"),
    ("run.allocated", "integer", "allocated peak of the run"),
    ("run.probability", "number?", "that the run runs out of memory; null without a GPU"),
    ("run.by", "[]object", "the same after some of the steps"),
    ("run.by[].step", "integer", "step, from 1"),
    ("run.by[].probability", "number", "that it does so up to this step"),
    ("run.half", "integer?", "half of these failures come up to this step"),
    ("run.orders", "integer", "seeded orders that the probability is taken over"),
    ("run.died", "integer?", "step at which the replayed order runs out of this GPU's memory"),
    ("run.died_in", "string?", "there: load, step, or the evaluation or merge after the step"),
    ("run.retries", "integer", "how often the allocator frees its cache in the replayed order"),
    ("run.padding", "number", "share of padding among all tokens"),
    ("run.seconds", "number?", "time of the replayed steps; null if unknown"),
    ("run.tokens_per_second", "number?", "without padding"),
    ("run.checkpoints", "object?", "what is saved; null if weights or states are sharded"),
    ("run.checkpoints.count", "integer", "number of checkpoints"),
    ("run.checkpoints.weights", "integer", "bytes of the trained weights"),
    ("run.checkpoints.states", "integer", "bytes of the optimizer states"),
    ("run.changes", "[]object", "what would change the run"),
    ("run.changes[].name", "string", "the change"),
    ("run.changes[].flags", "string", "flags for it"),
    ("run.changes[].reserved", "integer?", "reserved memory at the end then"),
    ("run.changes[].probability", "number?", "that the run runs out of memory then"),
    ("run.changes[].slower", "number?", "relative time of the run: 0.1 means 10 % slower"),
)
POINTS = 100  # steps of the curve in JSON
LINES = 9  # of the curve in text


def data(run: WholeRun | None) -> dict[str, Any] | None:
    if run is None:
        return None
    worst = {**dataclasses.asdict(run.worst), "step": run.worst.step + 1}
    return {
        "texts": dataclasses.asdict(run.texts),
        "order": run.order,
        "seed": run.seed,
        "epoch": run.epoch,
        "steps": len(run.steps),
        "curve": [{**dataclasses.asdict(one), "step": one.step + 1} for one in points(run, POINTS)],
        "worst": worst,
        "evaluation": run.evaluation,
        "reserved": run.reserved,
        "allocated": run.allocated,
        "probability": run.probability,
        "by": [{"step": step, "probability": chance} for step, chance in run.by],
        "half": run.half,
        "orders": run.orders,
        "died": None if run.died is None else run.died + 1,
        "died_in": run.died_in or None,
        "retries": run.retries,
        "padding": run.padding,
        "seconds": run.seconds,
        "tokens_per_second": run.tokens_per_second,
        "checkpoints": None if run.checkpoints is None else dataclasses.asdict(run.checkpoints),
        "changes": [dataclasses.asdict(one) for one in run.changes],
    }


def points(run: WholeRun, count: int) -> list[RunStep]:
    """The first step, the last, and evenly spaced ones between."""
    last = len(run.steps) - 1
    places = sorted({round(number * last / count) for number in range(count + 1)})
    return [run.steps[place] for place in places]


def chance(share: float) -> str:
    """`4 %`, `<1 %`, `>99 %`."""
    if 0 < share < 0.01:
        return "<1 %"
    if 0.99 < share < 1:
        return ">99 %"
    return f"{100 * share:.0f} %"


def counted(number: int, name: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def where(phase: str, step: int) -> str:
    """Where a run ends: `in step 5`, `in the evaluation after step 4`."""
    if phase == "load":
        return "while the model is loaded"
    return f"in step {step:,}" if phase == "step" else f"in the {phase} after step {step:,}"


def headline(estimate: Estimate) -> Iterator[str]:
    """How likely the run runs out of memory, and by which step: a line behind the verdict."""
    run = estimate.run
    if run is None or run.probability is None:
        return
    steps = counted(len(run.steps), "step")
    if run.probability == 0:
        orders = "the only order" if run.orders == 1 else f"none of {run.orders} orders"
        verb = "does not run" if run.orders == 1 else "runs"
        yield f"{orders} of the texts {verb} out of memory in {steps}"
        return
    by = "" if run.half is None else f", half of these failures come by step {run.half:,}"
    yield f"{chance(run.probability)} chance of running out of memory in {steps}{by}"


def whole_run_lines(estimate: Estimate, width: int) -> Iterator[str]:
    run = estimate.run
    if run is None:
        return
    texts, job = run.texts, estimate.job
    of = f" of {run.epoch:,} in an epoch" if len(run.steps) < run.epoch else ""
    if len(run.steps) > run.epoch:
        of = f", {len(run.steps) / run.epoch:.3g} epochs"
    yield f"whole run  {counted(len(run.steps), 'step')}{of}, texts {run.order}, seed {run.seed}"
    yield (
        f"texts      {texts.origin}; mean {texts.mean:,.0f} tokens, median {texts.median:,}, "
        f"99 % below {texts.p99:,}, longest {texts.longest:,}"
    )
    yield f"cut        {chance(texts.cut)} of the texts, at {texts.limit:,} tokens (--seq)"
    if texts.empty:
        yield f"empty      {texts.empty:,} texts without a token are left out"
    line = f", line {run.worst.line:,}" if run.worst.line else ""
    yield (
        f"worst      step {run.worst.step + 1:,}: batch {job.batch} x {run.worst.tokens:,} tokens"
        f"{line}, {gib(run.worst.allocated)} GiB allocated"
    )
    if run.died is not None:
        yield f"fails      this order runs out of memory {where(run.died_in, run.died + 1)}"
    if run.evaluation is not None:
        yield f"evaluation {gib(run.evaluation)} GiB allocated, on batches of the longest texts"
    if run.checkpoints is not None:
        yield checkpoint_words(run.checkpoints)
    yield f"padding    {chance(run.padding)} of all tokens"
    if run.seconds is not None and run.tokens_per_second is not None:
        whole = run.seconds * run.epoch / len(run.steps)
        epoch = "" if run.epoch == len(run.steps) else f", {duration(whole)} for an epoch"
        yield (
            f"time       {duration(run.seconds)} for these steps{epoch}: "
            f"{run.tokens_per_second:,.0f} tokens/s without padding"
        )
    yield from curve(estimate, run, width)
    yield from changes(run)


def checkpoint_words(saved: Checkpoints) -> str:
    many = counted(saved.count, "checkpoint")
    return (
        f"saving     {many}, weights {gib(saved.weights)} GiB and optimizer states "
        f"{gib(saved.states)} GiB; needs no GPU memory"
    )


def curve(estimate: Estimate, run: WholeRun, width: int) -> Iterator[str]:
    """What torch's allocator has reserved, over the steps; it never shrinks without need."""
    outside, usable = estimate.outside, estimate.usable
    limit = None if usable is None else max(0, usable[0] - outside)
    end = "" if limit is None else f" (│ {gib(limit)} GiB, the most it can have)"
    yield f"reserved memory over the run{end}"
    scale, columns = max(run.reserved, limit or 0, 1), max(8, min(50, width - 42))
    yield f"  {'step':>8}{'allocated':>11}{'reserved':>10}"
    for one in marks(run):
        drawn = bar(0, one.reserved, scale, columns, limit)
        yield (
            f"  {one.step + 1:>8,}{gib(one.allocated):>11}{gib(one.reserved):>10} GiB  {drawn}"
        ).rstrip()


def marks(run: WholeRun) -> Iterator[RunStep]:
    """Steps at which to show the curve, closer at its beginning, with the highest live peak up to
    each."""
    last, places = len(run.steps) - 1, set[int]()
    for number in range(LINES):
        places.add(round((last + 1) ** (number / (LINES - 1))) - 1)
    highest = 0
    for place, one in enumerate(run.steps):
        highest = max(highest, one.allocated)
        if place in places:
            yield dataclasses.replace(one, allocated=highest)


def changes(run: WholeRun) -> Iterator[str]:
    if not run.changes:
        return
    many = counted(min(COMPARED, len(run.steps)), "step")
    yield f"what would change it (reserved after {many}, chance of running out of memory)"
    for one in run.changes:
        yield f"  {one.flags or one.name:<38}{change_words(one)}"


def change_words(one: RunChange) -> str:
    words = [
        *([] if one.reserved is None else [f"{gib(one.reserved)} GiB"]),
        *([] if one.probability is None else [chance(one.probability)]),
        *([] if one.slower is None else [f"{100 * one.slower:+.0f} % time"]),
    ]
    return ", ".join(words)
