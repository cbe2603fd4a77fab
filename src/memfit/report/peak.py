"""What is alive at the peak, largest first, grouped by module: for people (80 columns) and as
data."""

from __future__ import annotations

from typing import Any, NamedTuple

from memfit.estimate import Estimate
from memfit.report.figures import gib, percent
from memfit.simulate.memory import Group

ROWS = 40  # lines of a table; the rest is summed up
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
INNER = 4  # of one module


class Module(NamedTuple):
    """All that is alive and belongs to one module, or to all modules of one name."""

    where: str
    size: int
    blocks: int
    groups: tuple[Group, ...]  # by falling size


def modules(estimate: Estimate) -> list[Module]:
    """By falling size."""
    found: dict[str, list[Group]] = {}
    for group in estimate.memory.groups:
        found.setdefault(group.where, []).append(group)
    made = (
        Module(
            where,
            sum(one.bytes for one in groups),
            sum(one.times for one in groups),
            tuple(sorted(groups, key=lambda one: -one.bytes)),
        )
        for where, groups in found.items()
    )
    return sorted(made, key=lambda one: (-one.size, one.where))


def table(estimate: Estimate, width: int = 80) -> str:
    whole = estimate.memory.allocated
    known = modules(estimate)
    blocks = sum(one.blocks for one in known)
    lines = [
        f"alive at the peak: {gib(whole)} GiB in {blocks} blocks",
        f"  {'GiB':>7} {'share':>5} {'blocks':>6}  module and tensors",
    ]
    left = list(known)
    while left and len(lines) < ROWS:
        lines += [
            line(size, whole, count, text, width) for size, count, text in entries(left.pop(0))
        ]
    if left:
        lines.append(
            line(
                sum(one.size for one in left),
                whole,
                sum(one.blocks for one in left),
                f"{len(left)} more module{'s' * (len(left) > 1)}",
                width,
            )
        )
    rounding = estimate.memory.parts.get("rounding", 0)
    if rounding:
        lines.append(line(rounding, whole, 0, "rounding by the allocator", width))
    return "\n".join(lines)


def entries(one: Module) -> list[tuple[int, int, str]]:
    """(bytes, blocks, text): the module, and below it the largest of what it holds."""
    name = one.where or "(no module)"
    if len(one.groups) == 1:
        return [(one.size, one.blocks, f"{name}: {described(one.groups[0])}")]
    shown, rest = one.groups[:INNER], one.groups[INNER:]
    found = [
        (one.size, one.blocks, name),
        *((group.bytes, group.times, "  " + described(group)) for group in shown),
    ]
    if rest:
        found.append(
            (
                sum(group.bytes for group in rest),
                sum(group.times for group in rest),
                f"  {len(rest)} more kind{'s' * (len(rest) > 1)}",
            )
        )
    return found


def line(size: int, whole: int, blocks: int, text: str, width: int) -> str:
    room = width - 25
    return f"  {gib(size):>7} {percent(size, whole):>5} {blocks or '':>6}  {shortened(text, room)}"


def shortened(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def described(group: Group) -> str:
    """`logits 2048 x 4096 fp32, nll_loss_backward`."""
    op = group.op.removesuffix(".default")
    return f"{group.part} {shape_of(group)}".strip() + (f", {op}" if op not in ("", "load") else "")


def shape_of(group: Group) -> str:
    """As a trace writes it (`[2, 3] float32`), or the factors of a formula, in the same words."""
    if not isinstance(group.formula, str):
        return " x ".join(map(str, group.formula))
    shape, bracket, dtype = group.formula.partition("] ")
    return (
        f"{shape[1:].replace(', ', ' x ')} {DTYPES.get(dtype, dtype)}".strip()
        if bracket
        else group.formula
    )


def data(estimate: Estimate) -> list[dict[str, Any]]:
    return [
        {
            "module": one.where,
            "total": one.size,
            "blocks": one.blocks,
            "holds": [
                {
                    "part": group.part,
                    "op": group.op,
                    "shape": shape_of(group),
                    "count": group.times,
                    "each": group.size,
                    "total": group.bytes,
                }
                for group in one.groups
            ],
        }
        for one in modules(estimate)
    ]


__all__ = ["data", "modules", "table"]
