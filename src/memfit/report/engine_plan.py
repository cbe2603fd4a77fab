"""A plan for a serving engine as text, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from memfit.plan.engine_goals import EnginePlan, EngineRow, Grid, Load, users_fit
from memfit.plan.engine_weights import AWQ_CHECKPOINT, WEIGHTS
from memfit.report.engine_answer import folded
from memfit.units import GIB

HEAD = ("weights", "cache", "layout", "users", "tokens", "first", "token", "tokens/s", "GiB", "$")
SHOWN_PASSED = 3  # cheaper machines that are listed


def write(plan: EnginePlan, form: str = "text", *, width: int = 80) -> str:
    if form == "json":
        return json.dumps(data(plan), indent=2, ensure_ascii=False)
    body = text(plan, width=width)
    return f"```\n{body}\n```" if form == "markdown" else body


def data(plan: EnginePlan) -> dict[str, Any]:
    """Everything, for programs."""
    question = plan.question
    return {
        "engine": question.planned.engine.name,
        "model": question.subject.name,
        "gpu": plan.cluster.gpu.id,
        "gpus": plan.cluster.gpus,
        "load": {
            "users": question.load.users,
            "in": question.load.prompt,
            "out": question.load.output,
            "ttft": question.load.first,
            "tpot": question.load.token,
        },
        "fits": plan.fits,
        "rows": [row_data(row) for row in plan.rows],
        "nearest": [row_data(row) for row in plan.close],
        "grid": None if plan.grid is None else grid_data(plan.grid),
        "passed": list(plan.passed),
        "problems": [str(problem) for problem in plan.problems],
    }


def row_data(row: EngineRow) -> dict[str, Any]:
    speed = row.speed
    return {
        "weights": row.weights,
        "cache": row.cache,
        "gpus_each": row.tensor,
        "replicas": row.replicas,
        "users": row.users,
        "length": row.length,
        "device": row.answer.device,
        "kv_tokens": row.answer.figures.get("kv_tokens"),
        "ttft": speed.first if speed else None,
        "tpot": speed.token if speed else None,
        "tokens_per_second": speed.tokens_per_second if speed else None,
        "dollars_per_million_tokens": row.dollars,
        "command": row.command,
        "missed": list(row.missed),
        "quality": quality(row.weights),
    }


def quality(name: str) -> dict[str, str] | None:
    """What was published of such weights; None of the model's own."""
    found = WEIGHTS.get(name)
    return None if found is None else {"published": found.quality, "source": found.cite}


def grid_data(grid: Grid) -> dict[str, Any]:
    return {
        "lengths": list(grid.lengths),
        "users": list(grid.users),
        "bytes": [list(row) for row in grid.cells],
        "most_users": list(grid.most),
        "limit": grid.limit,
    }


def text(plan: EnginePlan, *, width: int = 80) -> str:
    wrapped = (verdict(plan), table(plan), others(plan)), (remarks(plan),)
    whole = (start(plan), grid(plan))  # what people copy, and columns
    sections = [
        *([part for line in one for part in folded(line, width)] for one in wrapped[0]),
        *(list(one) for one in whole),
        *([part for line in one for part in folded(line, width)] for one in wrapped[1]),
    ]
    lines: list[str] = []
    for found in sections:
        lines += ["", *found] if lines and found else found
    return "\n".join(lines)


def verdict(plan: EnginePlan) -> Iterator[str]:
    """What fits, in one line, and on what."""
    question, load = plan.question, plan.question.load
    engine = question.planned.engine.title
    if plan.rows:
        best = plan.rows[0]
        yield f"{users_fit(best.users)}, {said(load, best)}"
    elif plan.close:
        what = "nothing holds the load" if load.given else "nothing fits"
        yield f"{what}; the nearest: {', '.join(plan.close[0].missed)}"
    elif plan.market:
        yield "not even one request fits, on any machine with a public price"
    else:
        yield "not even one request fits; `--gpu cheapest` finds a machine"
    version = (plan.rows or plan.close)[0].answer.version if plan.rows or plan.close else ""
    yield f"{question.subject.name}, {engine} {version}".rstrip() + f", {plan.cluster.name}"


def said(load: Load, row: EngineRow) -> str:
    if load.length:
        return f"each with {load.prompt:,} tokens in and {load.output:,} out"
    return f"each with up to {row.length:,} tokens"


def table(plan: EnginePlan) -> Iterator[str]:
    rows = plan.rows or plan.close
    if not rows:
        return
    cells = [HEAD, *(row_cells(row, bool(plan.question.load.length)) for row in rows)]
    shown = [
        index
        for index in range(len(HEAD))
        if any(line[index] not in ("", "-") for line in cells[1:])
    ]
    widths = [max(len(line[index]) for line in cells) for index in range(len(HEAD))]
    for line in cells:
        yield "  ".join(
            f"{line[index]:<{widths[index]}}" if index < 3 else f"{line[index]:>{widths[index]}}"
            for index in shown
        ).rstrip()
    if not plan.question.load.length:
        yield "users: that fit at once on all GPUs. tokens: of each request. GiB: per GPU."
    elif any(row.speed for row in rows):
        yield (
            "users: that fit at once on all GPUs. first, token: time to first token and per output "
            "token. GiB: per GPU. $: for 1,000,000 output tokens."
        )


def others(plan: EnginePlan) -> Iterator[str]:
    """Configurations that start but miss a goal."""
    if plan.rows and plan.close:
        yield "does not reach the goals"
        for row in plan.close:
            yield f"  {row.weights}, cache {row.cache}, {layout(row)}: {', '.join(row.missed)}"


def layout(row: EngineRow) -> str:
    return f"{row.replicas} x tp {row.tensor}" if row.tensor > 1 else f"{row.replicas} x 1 GPU"


def row_cells(row: EngineRow, said_length: bool) -> tuple[str, ...]:
    speed = row.speed
    return (
        row.weights,
        row.cache,
        layout(row),
        f"{row.users:,}",
        "-" if said_length else f"{row.length:,}",
        duration(speed.first) if speed else "-",
        duration(speed.token) if speed else "-",
        f"{speed.tokens_per_second:,.0f}" if speed else "-",
        f"{row.answer.device / GIB:.1f}",
        f"{row.dollars:.2f}" if row.dollars else "-",
    )


def duration(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def start(plan: EnginePlan) -> Iterator[str]:
    rows = plan.rows or plan.close
    if not rows or rows[0].answer.failure:
        return
    copies = rows[0].replicas
    yield "start it with" if copies == 1 else f"start {copies} copies, each with"
    yield f"  {rows[0].command}"
    if AWQ_CHECKPOINT in rows[0].command:
        model = plan.question.subject.name
        yield f"  {AWQ_CHECKPOINT}: the hub id or folder of an AWQ checkpoint of {model}"


def grid(plan: EnginePlan) -> Iterator[str]:
    """A table of context by users, in GiB; brackets mark what does not fit."""
    made = plan.grid
    if made is None:
        return
    row = (plan.rows or plan.close)[0]
    what = f"{row.weights}, cache {row.cache}, tp {row.tensor}"
    yield f"GiB per GPU by tokens of a request and users of one copy ({what})"
    head = "".join(f"{users:>7}" for users in made.users)
    yield f"{'tokens':>9}{head}   most"
    for length, cells, most in zip(made.lengths, made.cells, made.most, strict=True):
        shown = "".join(f"{cell(size, made.limit):>7}" for size in cells)
        yield f"{length:>9,}{shown}   {most:,}"
    yield f"[ ]: does not fit; the engine may use {made.limit / GIB:.1f} GiB. most: users that fit."


def cell(size: int, limit: int) -> str:
    return f"{size / GIB:.1f} " if size <= limit else f"[{size / GIB:.0f}]"


def remarks(plan: EnginePlan) -> Iterator[str]:
    rows = plan.rows or plan.close
    for name in dict.fromkeys(row.weights for row in rows):
        if found := WEIGHTS.get(name):
            yield f"{name}: {found.how}; measured quality: {found.quality} ({found.cite})"
    if any(row.cache != "auto" for row in rows):
        yield "a cache in fp8 holds twice the tokens; test the quality of its answers"
    speeds = [row.speed for row in rows if row.speed]
    if speeds:
        whose = "on this GPU" if speeds[0].measured else "on a similar GPU"
        yield f"times: estimated from kernels measured {whose}; time on the host is not counted"
    if plan.price_note and any(row.dollars for row in rows):
        yield f"price: ${plan.dollars:.2f} per GPU-hour on {plan.price_note.split(',')[0]}"
    for line in plan.passed[-SHOWN_PASSED:]:
        yield f"cheaper: {line}"
    for problem in plan.problems:
        yield str(problem)


__all__ = ["data", "text", "write"]
