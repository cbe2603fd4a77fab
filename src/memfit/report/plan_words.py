"""What a plan says in sentences: the fastest of each method, the setting, commands to copy."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from memfit.commands import command, gpu_words
from memfit.hardware import usable
from memfit.plan.planning import Plan, Row
from memfit.report import serving
from memfit.report.figures import gib
from memfit.report.text import assumed_words

METHODS = {"full": "Full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
ENGINES = {"zero": "ZeRO-", "fsdp": "FSDP", "fsdp1": "FSDP1", "hsdp": "HSDP", "ddp": "DDP"}
APART = "These methods train different weights: compare the layouts of one method."


def conclusions(plan: Plan, width: int) -> Iterator[str]:
    """The fastest of each method in a sentence, with its command."""
    shown: dict[str, Row] = {}
    for row in plan.rows:
        shown.setdefault(row.kind.method, row)
    for method, row in shown.items():
        one = row.estimate
        where = engine_words(row.kind.layout)
        took = "" if one.time is None else f", {one.time.seconds:.3g} s per step"
        room = gib(usable(plan.cluster.gpu))
        fastest = "is fastest" if plan.policy == "fastest" else "is best"
        said = f"{METHODS.get(method, method)} {fastest} {where}: {gib(one.device)} of {room} GiB"
        if one.job.training and plan.work.job.task == "pretrain":
            said = said.replace("Full fine-tuning", "Training", 1)
        yield from wrapped(f"{said}{took}", width)
        yield f"  {asking(plan, row)}"
    if len(shown) > 1:
        yield APART


def best_serving(plan: Plan) -> Iterator[str]:
    """What answers best, in a sentence."""
    if not plan.rows or plan.rows[0].pace is None or plan.work.serving is None:
        return
    row, pace = plan.rows[0], plan.rows[0].pace
    size, groups = row.estimate.strategy.ranks, row.groups
    where = "one GPU" if size == 1 else f"{size} GPUs by tensor parallelism"
    each = f"{groups} copies on {where} each" if groups > 1 else f"on {where}"
    count = "1 request" if pace.requests == 1 else f"{pace.requests:,} requests"
    yield (
        f"best {plan.work.serving.goal}: {row.kind.method} weights, {each}: "
        f"{pace.tokens_per_second:,.0f} tokens/s for {count} at once, "
        f"{gib(row.estimate.device)} of {gib(usable(plan.cluster.gpu))} GiB"
    )


def engine_words(place: str) -> str:
    """`with ZeRO-3 and CPU offload`, `on one GPU`."""
    if place.startswith("one GPU"):
        return "on one GPU" + (" with CPU offload" if "offload" in place else "")
    words = " ".join(ENGINES.get(word, word) for word in place.split()).replace("ZeRO- ", "ZeRO-")
    return f"with {words.replace(' + offload', ' and CPU offload')}"


def setting(plan: Plan, width: int) -> Iterator[str]:
    """The work of a step, what was assumed, and how far the search went."""
    yield from (line for one in head(plan) for line in wrapped(one, width))
    if plan.work.assumed and plan.rows:
        job = plan.rows[0].estimate.job
        said = assumed_words(job, set(plan.work.assumed) - {"batch"})
        if "precision" not in plan.work.assumed and any(plan.work.usual.values()):
            each: dict[str, dict[str, None]] = {}
            for row in plan.rows:
                each.setdefault(row.estimate.job.precision, {})[row.kind.method] = None
            said += " --precision " + ", ".join(
                f"{value} ({', '.join(methods)})" for value, methods in each.items()
            )
        batch = f"; {plan.work.assumed['batch']} sequences per GPU and step"
        yield from wrapped(f"assumed: {said}{batch if 'batch' in plan.work.assumed else ''}", width)


def asking(plan: Plan, row: Row) -> str:
    """The command that asks for this row alone."""
    one = row.estimate
    cluster = plan.cluster if one.cluster is None else one.cluster
    text = command(
        plan.work.model.name,
        one.job,
        gpu_words(cluster),
        one.strategy,
        plan.work.model.config,
        cluster.gpu.half,
    )
    return " ".join(text.split())


def head(plan: Plan) -> Iterator[str]:
    work, counted = plan.work, plan.counted
    if work.serving is not None:
        yield f"{work.model.name} on {plan.cluster.name}, {serving.subject(plan)}"
        yield serving.looked(plan) + (" so far (interrupted)" if plan.interrupted else "")
        return
    yield (
        f"{work.model.name} on {plan.cluster.name}, {work.sequences} sequences of "
        f"{work.job.seq} tokens per step"
    )
    so_far = "searched so far (interrupted)" if plan.interrupted else "searched"
    yield (
        f"{so_far}: {counted.size:,} configurations, {counted.estimated:,} estimated in full; the "
        "others cannot be faster or do not fit"
    )


def wrapped(line: str, width: int, indent: str = "  ") -> list[str]:
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


__all__ = [
    "METHODS",
    "asking",
    "best_serving",
    "conclusions",
    "engine_words",
    "head",
    "setting",
    "wrapped",
]
