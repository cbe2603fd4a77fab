"""A plan as text, Markdown and JSON: a table of configurations with their cost and trade-offs, the
front, and why others are missing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from string import ascii_letters
from typing import Any

from memfit.defaults import decisive
from memfit.estimate import Estimate
from memfit.job import Job
from memfit.plan.inference import SERVED
from memfit.plan.planning import Checked, Dropped, Plan, Row
from memfit.plan.space import AXES
from memfit.report import markdown as md
from memfit.report import serving
from memfit.report.codec import to_dict
from memfit.report.figures import gib, percent
from memfit.report.plan_words import (
    METHODS,
    asking,
    best_serving,
    conclusions,
    engine_words,
    head,
    setting,
    wrapped,
)
from memfit.uses import uses

SCHEMA = 1
WIDTH = 80


def text(plan: Plan, width: int = WIDTH) -> str:
    return "\n".join(
        line for block in blocks(plan, width) if block for line in [*block, ""]
    ).rstrip()


def blocks(plan: Plan, width: int) -> Iterator[list[str]]:
    if plan.work.serving is not None:
        yield [line for one in (*best_serving(plan), *head(plan)) for line in wrapped(one, width)]
    elif plan.rows:
        yield list(conclusions(plan, width))
        yield list(setting(plan, width))
    if not plan.rows:
        yield wrapped(f"no plan fits: {plan.reason}", width)
        if plan.nearest is not None:
            yield from nearest_blocks(nearest(plan.nearest), width)
        if plan.work.serving is None:
            yield list(setting(plan, width))
        yield losses(plan, width)
        return
    yield table(plan)
    for number, row in enumerate(plan.rows, 1):
        yield list(detail(plan, number, row, width))
    if plan.trade:
        yield columns(
            serving.trade(plan), serving.LEFT, "time per request against tokens per second"
        )
    yield frontier(plan, width)
    yield losses(plan, width)


def nearest_blocks(close: Plan, width: int) -> Iterator[list[str]]:
    if close.work.serving is None:
        yield [*wrapped(nearest_words(close), width), *conclusions(close, width)]
    else:
        yield wrapped(nearest_words(close), width)
    yield table(close)
    yield from (list(detail(close, 1, row, width)) for row in close.rows)


def wanted(plan: Plan) -> str:
    return (
        f"{plan.work.sequences} sequences per step"
        if plan.work.serving is None
        else serving.subject(plan)
    )


def frontier(plan: Plan, width: int) -> list[str]:
    """The best trade-offs over all candidates, with `--front`."""
    if plan.frontier is None:
        return []
    told = "best trade-offs of time, memory and cost among all candidates"
    lines = [
        line
        for name, row in named(plan.frontier)
        for line in wrapped(f"{name}  {flags(row.estimate, plan.work.job)}", width, "   ")
    ]
    return [
        *wrapped(told, width),
        *columns([(*COLUMNS, "GPUs"), *points(plan, plan.frontier)], frozenset({0, 1, 2})),
        "",
        *lines,
    ]


def points(plan: Plan, rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    for name, row in named(rows):
        assert row.estimate.cluster is not None
        yield (name, *cells(plan, 0, row)[1:], str(row.estimate.cluster.gpus))


def named(rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    """By letters: numbers are those of the plan's own rows."""
    return zip(ascii_letters, rows, strict=False)


def nearest(plan: Plan) -> Plan:
    """Of the nearest that fits its first row."""
    return dataclasses.replace(plan, rows=plan.rows[:1])


def nearest_words(plan: Plan) -> str:
    return f"the nearest plan that fits, {wanted(plan)} on {plan.cluster.name}:"


COLUMNS = ("", "method", "layout", "s/step", "tokens/s", "GiB", "to", "$", "hours")


def cells(plan: Plan, number: int, row: Row) -> tuple[str, ...]:
    one, time, mark = (
        row.estimate,
        row.estimate.time,
        f"{number}{'*' if fronted(plan, row) else ''}",
    )
    if row.pace is not None:
        return serving.cells(mark, row)
    return (
        mark,
        row.kind.method,
        row.kind.layout,
        "?" if time is None else f"{time.seconds:.3g}",
        "?" if time is None else f"{time.tokens_per_second:,.0f}",
        gib(one.device),
        gib(one.band.high),
        "?" if row.cost is None or row.cost.dollars is None else f"{row.cost.dollars:,.2f}",
        "?" if row.cost is None else f"{row.cost.hours:.3g}",
    )


def fronted(plan: Plan, row: Row) -> bool:
    return any(one is row for one in plan.front)


def table(plan: Plan) -> list[str]:
    rows = [cells(plan, number, row) for number, row in enumerate(plan.rows, 1)]
    if plan.work.serving is not None:
        return [
            *columns([serving.COLUMNS, *rows], serving.LEFT),
            *wrapped(serving.legend(plan), WIDTH),
        ]
    told = (
        f"$ and hours: for {plan.tokens:,.0f} tokens; "
        f"{plan.paid.origin.partition(',')[0]}. to: end of the likely range. *: no row of its "
        "method is both faster and smaller."
    )
    return [*columns([COLUMNS, *rows], frozenset({0, 1, 2})), *wrapped(told, WIDTH)]


def columns(rows: Sequence[tuple[str, ...]], left: frozenset[int], title: str = "") -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [*([title] if title else []), *lines]


def detail(plan: Plan, number: int, row: Row, width: int) -> Iterator[str]:
    one = row.estimate
    if row.pace is not None:
        yield from wrapped(f"{number}  {flags(one, plan.work.job)}", width, "   ")
    elif any(other.kind.method == row.kind.method for other in plan.rows[: number - 1]):
        yield f"{number}  {asking(plan, row)}"
    else:  # its command is among the conclusions
        method = METHODS.get(row.kind.method, row.kind.method)
        yield f"{number}  {method} {engine_words(row.kind.layout)}"
    yield from wrapped(f"   {binds(one)}", width, "   ")
    if row.pace is not None and (told_of := serving.binds(plan, row)):
        yield from wrapped(f"   {told_of}", width, "   ")
    for told in row.checked:
        yield from wrapped(f"   {judgement(told, one)}", width, "   ")
    if one.time is None and one.untimed:
        yield from wrapped(f"   no time: {one.untimed}", width, "   ")
    if row.gives_up:
        yield from wrapped(f"   trade-offs: {'; '.join(row.gives_up)}", width, "   ")


def judgement(told: Checked, one: Estimate) -> str:
    """The memory of a plan by a trace or a measurement."""
    if told.device is None:
        return f"{told.by}: {told.why or 'nothing'}"
    took = "" if told.seconds is None else f", {told.seconds:.3g} s per step"
    return (
        f"{told.by}: {gib(told.device)} GiB{took} (formulas differ by "
        f"{100 * (one.device / told.device - 1):+.2f} %)"
    )


def binds(one: Estimate) -> str:
    """What fills the peak most, and when it comes."""
    parts = {name: size for name, size in one.parts.items() if name not in ("context", "nccl")}
    name, size = max(parts.items(), key=lambda part: part[1])
    at = (
        ""
        if one.memory.at is None
        else f", in the {one.memory.at.phase}"
        + (f" ({one.memory.at.op})" if one.memory.at.op else "")
    )
    return f"{name}: {percent(size, one.device)} of the peak{at}"


def flags(one: Estimate, common: Job) -> str:
    """The options that `memfit estimate` takes."""
    plain = Job()
    open_ = (
        (*AXES, "activation_offload", "batch", "accumulate")
        if one.job.training
        else (*SERVED, "quant", "batch")
    )
    names = [name for name in open_ if getattr(one.job, name) != getattr(plain, name)]
    words = [flag(name, getattr(one.job, name)) for name in names]
    return " ".join([*words, *(f"--use {use}" for use in uses(one.strategy))]) or "the defaults"


def flag(name: str, value: Any) -> str:
    spelled = name.replace("_", "-")
    return (
        (f"--{spelled}" if value else f"--no-{spelled}")
        if isinstance(value, bool)
        else f"--{spelled} {value}"
    )


def job_file(plan: Plan, row: Row) -> str:
    """What `memfit estimate FILE` answers the same for: every option that is not the default, and
    the GPUs."""
    one, plain = row.estimate, Job()
    needed = decisive(one.job)
    work, nodes = one.job, plan.cluster if row.pace is None or one.cluster is None else one.cluster
    count = (
        f"{nodes.nodes}x{nodes.gpus_per_node}x"
        if nodes.nodes > 1 or nodes.gpus_per_node > 1
        else ""
    )
    notes = (
        []
        if row.pace is None
        else [
            (
                f"# {row.kind.layout}, {row.pace.requests:,} concurrent requests; "
                f"{'; '.join(row.gives_up) or 'nothing given up'}"
            )
        ]
    )
    lines = [
        *notes,
        f"model: {json.dumps(plan.work.model.name)}",
        f"gpu: {json.dumps(count + nodes.gpu.id)}",
    ]
    if one.strategy:
        lines.append(f"use: [{', '.join(json.dumps(use) for use in uses(one.strategy))}]")
    for option in dataclasses.fields(Job):
        value = getattr(work, option.name)
        if value != getattr(plain, option.name) or option.name in needed:
            lines.append(f"{option.name.replace('_', '-')}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def losses(plan: Plan, width: int) -> list[str]:
    if plan.work.serving is not None:
        dropped = [
            (f"  {one.method} {one.layout}".rstrip(), serving.lost(one)) for one in plan.dropped
        ]
        lines = [
            line for name, why in dropped for line in wrapped(f"{name}: {why}", width, "      ")
        ]
        return ["not chosen", *lines] if lines else []
    best = {
        row.kind.method: row.estimate.time.seconds
        for row in reversed(plan.rows)
        if row.estimate.time is not None
    }
    found: dict[tuple[str, str], list[str]] = {}
    for one in plan.dropped:
        why, figure = lost(one, best.get(one.method))
        found.setdefault((one.method, why), []).append(f"{one.layout}{figure}".strip())
    lines = []
    for (method, why), layouts in found.items():
        rest = len(layouts) - SHOWN
        said = ", ".join(layouts[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
        lines += wrapped(f"  {method} {why}: {said}".replace("   ", "  "), width, "      ")
    return ["not chosen", *lines] if lines else []


SHOWN = 8  # layouts with the same reason


def lost(one: Dropped, best: float | None) -> tuple[str, str]:
    """Why a kind is not among the rows, and the figure of this one."""
    if one.refused and (one.seconds is None or one.refused.startswith("no faster")):
        return one.refused, ""
    if one.seconds is not None and best is not None and one.seconds >= best:
        more = one.seconds / best - 1
        return "slower", f" (by {f'{100 * more:.0f}' if more >= 0.01 else '<1'} %)"
    if one.needs is not None:
        return "too large", f" (at least {gib(one.needs)} GiB)"
    return "slower than the rows shown", ""


def markdown(plan: Plan) -> str:
    lines = [*head(plan), ""]
    if plan.rows:
        lines += ranked(plan)
        if plan.frontier is not None:
            lines += ["", *md.table((*COLUMNS, "GPUs"), points(plan, plan.frontier)), ""]
            lines += [
                f"- {name}: `{flags(row.estimate, plan.work.job)}`"
                for name, row in named(plan.frontier)
            ]
    else:
        lines += [f"no plan fits: {plan.reason}"]
        if plan.nearest is not None:
            close = nearest(plan.nearest)
            lines += ["", nearest_words(close), "", *ranked(close)]
    return "\n".join(lines)


def ranked(plan: Plan) -> Iterator[str]:
    """The rows in a table, and each one's options."""
    head_row = COLUMNS if plan.work.serving is None else serving.COLUMNS
    yield from md.table(
        head_row, (cells(plan, number, row) for number, row in enumerate(plan.rows, 1))
    )
    yield ""
    yield from (
        f"{number}. `{flags(row.estimate, plan.work.job)}`: {binds(row.estimate)}"
        for number, row in enumerate(plan.rows, 1)
    )


def data(plan: Plan) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "fits": plan.fits or (None if plan.interrupted else False),
        "model": plan.work.model.name,
        "gpu": plan.cluster.gpu.id,
        "gpus": plan.cluster.gpus,
        "sequences": plan.work.sequences,
        "tokens": plan.tokens,
        "policy": plan.policy,
        "interrupted": plan.interrupted,
        "counted": {
            "candidates": plan.counted.size,
            "walked": plan.counted.walked,
            "estimated": plan.counted.estimated,
            "replayed": plan.counted.replayed,
        },
        "reason": plan.reason,
        "rows": [{**row_data(row), "front": fronted(plan, row)} for row in plan.rows],
        "dropped": [
            {**dataclasses.asdict(one), "largest": list(one.largest or ())} for one in plan.dropped
        ],
        "serving": serving.asked(plan),
        "trade": [row_data(row) for row in plan.trade],
        "nearest": None if plan.nearest is None else data(plan.nearest),
        "frontier": None if plan.frontier is None else [row_data(row) for row in plan.frontier],
    }


def row_data(row: Row) -> dict[str, Any]:
    return {
        "kind": row.kind._asdict(),
        "use": [*uses(row.estimate.strategy)],
        "gives_up": list(row.gives_up),
        **serving.figures(row),
        "cost": None if row.cost is None else dataclasses.asdict(row.cost),
        "checked": [dataclasses.asdict(told) for told in row.checked],
        "estimate": to_dict(row.estimate),
    }


__all__ = ["data", "job_file", "markdown", "text"]
