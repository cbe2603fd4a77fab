"""A plan for people and programs: a table of strategies, what each costs and gives up, the front, and why others are not there."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from memfit.estimate import Estimate
from memfit.job import Job
from memfit.plan.planning import Checked, Dropped, Plan, Row
from memfit.plan.space import AXES
from memfit.report import markdown as md
from memfit.report.codec import to_dict
from memfit.report.figures import gib, percent
from memfit.strategy import Layout, Strategy

SCHEMA = 1
WIDTH = 80


def text(plan: Plan, width: int = WIDTH) -> str:
    return "\n".join(line for block in blocks(plan, width) if block for line in [*block, ""]).rstrip()


def blocks(plan: Plan, width: int) -> Iterator[list[str]]:
    yield [line for one in head(plan) for line in wrapped(one, width)]
    if not plan.rows:
        yield wrapped(f"no plan fits: {plan.reason}", width)
        yield losses(plan, width)
        if plan.nearest is not None:
            yield wrapped(f"the nearest that does, {plan.nearest.work.sequences} sequences a step on {cluster(plan.nearest)}:", width)
            yield table(replace_rows(plan.nearest, 1))
            yield from (list(detail(plan.nearest, 1, row, width)) for row in plan.nearest.rows[:1])
        return
    yield table(plan)
    for number, row in enumerate(plan.rows, 1):
        yield list(detail(plan, number, row, width))
    yield losses(plan, width)


def replace_rows(plan: Plan, count: int) -> Plan:
    return dataclasses.replace(plan, rows=plan.rows[:count])


def head(plan: Plan) -> Iterator[str]:
    work, counted = plan.work, plan.counted
    yield f"{work.model.name} on {cluster(plan)}, {work.sequences} sequences of {work.job.seq} tokens a step"
    yield (
        f"{counted.size:,} candidates: {counted.estimated} estimated, {counted.replayed} with the allocator replayed, the others ruled out by bounds"
        f" ({counted.walked} walks of one GPU's kernels)" + (" so far (interrupted)" if plan.interrupted else "")
    )


def cluster(plan: Plan) -> str:
    one = plan.cluster
    nodes = f"{one.nodes} x " if one.nodes > 1 else ""
    return f"{nodes}{one.gpus_per_node} x {one.gpu.name}"


COLUMNS = ("", "method", "layout", "s/step", "tokens/s", "GiB", "to", "$", "hours")


def cells(plan: Plan, number: int, row: Row) -> tuple[str, ...]:
    one, time = row.estimate, row.estimate.time
    return (
        f"{number}{'*' if fronted(plan, row) else ''}", row.kind.method, row.kind.layout, "?" if time is None else f"{time.seconds:.3g}",
        "?" if time is None else f"{time.tokens_per_second:,.0f}", gib(one.device), gib(one.band.high),
        "?" if row.cost is None or row.cost.dollars is None else f"{row.cost.dollars:,.2f}", "?" if row.cost is None else f"{row.cost.hours:.3g}",
    )  # fmt: skip


def fronted(plan: Plan, row: Row) -> bool:
    return any(one is row for one in plan.front)


def table(plan: Plan) -> list[str]:
    rows = [COLUMNS, *(cells(plan, number, row) for number, row in enumerate(plan.rows, 1))]
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
    left = {0, 1, 2}
    lines = [
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    told = f"$ and hours: of {plan.tokens:,.0f} tokens; {plan.paid.origin.partition(',')[0]}. *: none of these is both quicker and smaller."
    return [*lines, *wrapped(told, WIDTH)]


def detail(plan: Plan, number: int, row: Row, width: int) -> Iterator[str]:
    one = row.estimate
    yield from wrapped(f"{number}  {flags(one, plan.work.job)}", width, "   ")
    yield from wrapped(f"   {binds(one)}", width, "   ")
    for told in row.checked:
        yield from wrapped(f"   {judgement(told, one)}", width, "   ")
    if one.time is None and one.untimed:
        yield from wrapped(f"   no time: {one.untimed}", width, "   ")
    if row.gives_up:
        yield from wrapped(f"   gives up: {'; '.join(row.gives_up)}", width, "   ")


def judgement(told: Checked, one: Estimate) -> str:
    """What another judge says beside the formulas."""
    if told.device is None:
        return f"{told.by}: {told.why or 'nothing'}"
    took = "" if told.seconds is None else f", {told.seconds:.3g} s a step"
    return f"{told.by}: {gib(told.device)} GiB{took} (the formulas are {100 * (one.device / told.device - 1):+.2f} % off)"


def binds(one: Estimate) -> str:
    """What fills the peak most, and when it comes."""
    parts = {name: size for name, size in one.parts.items() if name not in ("context", "nccl")}
    name, size = max(parts.items(), key=lambda part: part[1])
    at = "" if one.memory.at is None else f", in the {one.memory.at.phase}" + (f" ({one.memory.at.op})" if one.memory.at.op else "")
    return f"{name}: {percent(size, one.device)} of the peak{at}"


def flags(one: Estimate, common: Job) -> str:
    """The options that `memfit estimate` takes."""
    plain = Job()
    names = [name for name in (*AXES, "batch", "accumulate") if getattr(one.job, name) != getattr(plain, name)]
    words = [flag(name, getattr(one.job, name)) for name in names]
    return " ".join([*words, *(f"--use {use}" for use in uses(one.strategy))]) or "the defaults"


def flag(name: str, value: Any) -> str:
    spelled = name.replace("_", "-")
    return (f"--{spelled}" if value else f"--no-{spelled}") if isinstance(value, bool) else f"--{spelled} {value}"


def uses(strategy: Strategy) -> Iterator[str]:
    """As `--use` reads them."""
    for name, layout in strategy.uses():
        yield ",".join([f"{name}={layout.size}", *settings(layout)])


def settings(layout: Layout) -> Iterator[str]:
    for one in dataclasses.fields(layout):
        value = getattr(layout, one.name)
        if one.name != "size" and value != one.default:
            spelled = one.name.replace("_", "-")
            yield spelled if value is True else f"{spelled}={'no' if value is False else value}"


def job_file(plan: Plan, row: Row) -> str:
    """What `memfit estimate FILE` answers the same for: every option that is not the default, and the GPUs."""
    one, plain = row.estimate, Job()
    work, nodes = one.job, plan.cluster
    count = f"{nodes.nodes}x{nodes.gpus_per_node}x" if nodes.nodes > 1 or nodes.gpus_per_node > 1 else ""
    lines = [f"model: {json.dumps(plan.work.model.name)}", f"gpu: {json.dumps(count + nodes.gpu.id)}"]
    if one.strategy:
        lines.append(f"use: [{', '.join(json.dumps(use) for use in uses(one.strategy))}]")
    for option in dataclasses.fields(Job):
        value = getattr(work, option.name)
        if value != getattr(plain, option.name):
            lines.append(f"{option.name.replace('_', '-')}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def losses(plan: Plan, width: int) -> list[str]:
    best = next((row.estimate.time.seconds for row in plan.rows if row.estimate.time is not None), None)
    lines = [
        line for one in plan.dropped for line in wrapped(f"  {one.method} {one.layout}".rstrip() + f": {lost(one, best)}", width, "      ")
    ]
    return ["not among them", *lines] if lines else []


def lost(one: Dropped, best: float | None) -> str:
    if one.seconds is not None and best is not None:
        return f"{one.seconds:.3g} s a step or more, {100 * (one.seconds / best - 1):.0f} % behind the first"
    if one.needs is not None:
        return f"needs {gib(one.needs)} GiB of a GPU or more"
    return one.refused or "not looked at: others are quicker for certain"


def wrapped(line: str, width: int, indent: str = "  ") -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def markdown(plan: Plan) -> str:
    lines = [*head(plan), ""]
    if plan.rows:
        lines += md.table(COLUMNS, (cells(plan, number, row) for number, row in enumerate(plan.rows, 1)))
        lines += [
            "",
            *(f"{number}. `{flags(row.estimate, plan.work.job)}`: {binds(row.estimate)}" for number, row in enumerate(plan.rows, 1)),
        ]
    else:
        lines += [f"no plan fits: {plan.reason}"]
    return "\n".join(lines)


def data(plan: Plan) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "fits": plan.fits,
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
        "dropped": [dataclasses.asdict(one) for one in plan.dropped],
        "nearest": None if plan.nearest is None else data(plan.nearest),
    }


def row_data(row: Row) -> dict[str, Any]:
    return {
        "kind": row.kind._asdict(),
        "use": [*uses(row.estimate.strategy)],
        "gives_up": list(row.gives_up),
        "cost": None if row.cost is None else dataclasses.asdict(row.cost),
        "checked": [dataclasses.asdict(told) for told in row.checked],
        "estimate": to_dict(row.estimate),
    }


__all__ = ["data", "job_file", "markdown", "text"]
