"""A plan for answers: its head, its table, what binds each row, and how seconds trade against
tokens a second."""

from __future__ import annotations

import dataclasses
from typing import Any

from memfit.plan.goals import Asked
from memfit.plan.planning import Dropped, Plan, Row
from memfit.report.figures import gib
from memfit.report.pace import duration

COLUMNS = ("", "weights", "layout", "at once", "answer", "token", "tokens/s", "GiB", "$")
LEFT = frozenset({0, 1, 2})


def asked_of(plan: Plan) -> Asked:
    assert plan.work.serving is not None
    return plan.work.serving


def subject(plan: Plan) -> str:
    job, asked = plan.work.job, asked_of(plan)
    batches = "/".join(map(str, plan.work.batches))
    many = (
        f"{asked.requests:,} at once"
        if asked.requests
        else f"{batches} per group of GPUs"
        if batches
        else "as many requests as fit"
    )
    return (
        f"{job.new_tokens:,} output tokens for prompts of {job.seq:,} tokens, "
        f"{many}, for {asked.goal}"
    )


def looked(plan: Plan) -> str:
    counted = plan.counted
    return (
        f"{counted.size:,} candidates: {counted.estimated:,} estimated, {counted.replayed} "
        "with the allocator replayed"
    )


def cells(mark: str, row: Row) -> tuple[str, ...]:
    pace = row.pace
    assert pace is not None
    return (
        mark,
        row.kind.method,
        row.kind.place,
        f"{pace.requests:,}",
        duration(pace.seconds),
        duration(pace.token),
        rate(pace.tokens_per_second),
        gib(row.estimate.device),
        dollars(row),
    )


def rate(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 10 else f"{tokens:.2g}"


def dollars(row: Row) -> str:
    return "?" if row.cost is None or row.cost.dollars is None else f"{row.cost.dollars:,.3g}"


def legend(plan: Plan) -> str:
    front = "*: no plan is both faster per request and higher in throughput"
    return (
        f"GiB: per GPU. $: for {plan.tokens:,.0f} new tokens; "
        f"{plan.paid.origin.partition(',')[0]}. {front}."
    )


def trade(plan: Plan) -> list[tuple[str, ...]]:
    """Seconds against tokens a second: all that none beats in both."""
    head = (*COLUMNS[:-2], "cache", "attention")
    lines = [
        (*cells("", row)[:-2], row.estimate.job.cache, row.estimate.job.attention)
        for row in plan.trade
    ]
    return [head, *lines] if len(lines) > 1 else []


def binds(plan: Plan, row: Row) -> str:
    """The first token, the band, and what each other token mostly waits for."""
    one = row.estimate.generation
    if one is None or row.pace is None or one.new_tokens < 2 or not one.token:
        return ""
    share = (
        f"{100 * one.waiting / one.token:.0f} % of a token's time is spent on "
        f"launching {one.kernels:,} kernels"
    )
    said = [share] if one.waiting * 3 > one.token else []
    if not said:
        parts: dict[str, float] = {}
        for kind in row.estimate.kernels:
            if kind.phase == "decode":
                parts[kind.part] = parts.get(kind.part, 0.0) + kind.total
        name, seconds = max(parts.items(), key=lambda part: part[1])
        said = [
            (
                f"{100 * seconds / sum(parts.values()):.0f} % of a token's time is "
                f"{NAMES.get(name, name)}"
            )
        ]
    said = [
        (
            f"time to first token {duration(row.pace.first)}; up to "
            f"{gib(row.estimate.band.high)} GiB"
        ),
        *said,
    ]
    idle = plan.cluster.gpus - row.groups * row.estimate.strategy.ranks
    said += [f"{idle} GPU{'s' if idle > 1 else ''} idle"] if idle else []
    energy = None if row.cost is None else row.cost.kilowatt_hours
    said += [] if energy is None else [f"{energy:.3g} kWh for {plan.tokens:,.0f} tokens"]
    return "; ".join(said)


NAMES = {
    "matmul": "matrix multiplications",
    "memory": "memory bandwidth: KV cache, norms, sums",
    "communication": "all-reduce",
}


def lost(one: Dropped) -> str:
    if one.refused and one.seconds is None:
        return one.refused
    if one.seconds is not None:
        return (
            f"at least {duration(one.seconds)} per request, at most "
            f"{rate(one.tokens_per_second or 0.0)} tokens/s"
        )
    if one.needs is not None:
        most = "" if one.largest is None else f", of which {one.largest[0]} {gib(one.largest[1])}"
        return f"does not fit: needs at least {gib(one.needs)} GiB per GPU{most}"
    return "skipped"


def figures(row: Row) -> dict[str, Any]:
    return {
        "pace": None if row.pace is None else dataclasses.asdict(row.pace),
        "groups": row.groups,
    }


def asked(plan: Plan) -> dict[str, Any] | None:
    found = plan.work.serving
    return None if found is None else {**dataclasses.asdict(found), "weights": list(found.weights)}


__all__ = [
    "COLUMNS",
    "LEFT",
    "asked",
    "binds",
    "cells",
    "figures",
    "legend",
    "looked",
    "lost",
    "subject",
    "trade",
]
