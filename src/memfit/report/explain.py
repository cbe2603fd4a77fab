"""The working: every kind of block alive at the peak, with its formula and the numbers put in."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from math import prod

from memfit.estimate import Estimate
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, MoE
from memfit.report.figures import gib, with_unit
from memfit.report.timing import timing
from memfit.simulate.memory import Group
from memfit.verdicts import middle

LEGEND = {
    "B": "sequences",
    "S": "tokens of one",
    "T": "tokens in all, B·S",
    "D": "model width",
    "N": "query heads",
    "K": "key/value heads",
    "H": "head size",
    "F": "feed-forward width",
    "V": "vocabulary",
    "E": "experts",
    "R": "adapter rank",
    "P": "positions",
}


@dataclass(frozen=True, kw_only=True)
class Working:
    """One kind of block: `letters` and `figures` are its formula, `each` the bytes of one, `total`
    of all `count`."""

    part: str
    where: str
    op: str
    count: int
    letters: str
    figures: str
    each: int
    total: int


def workings(estimate: Estimate) -> Iterator[Working]:
    """By part, the largest first. `rounding`, fragmentation and the context have no formula."""
    letters = _letters(estimate)
    for group in estimate.memory.groups:
        symbols, figures = _formula(group, letters)
        yield Working(
            part=group.part,
            where=group.where,
            op=group.op,
            count=group.times,
            letters=symbols,
            figures=figures,
            each=group.size,
            total=group.bytes,
        )


def working(estimate: Estimate, *, width: int = 80) -> str:
    """As text: parts, then blocks of one kind a line and its formula in the next."""
    lines = ["every part in detail, at the allocated peak"]
    part, used = "", ""
    for one in workings(estimate):
        if one.part != part:
            part = one.part
            lines += ["", f"{part}  {gib(estimate.memory.parts[part])} GiB"]
        lines.append(
            f"  {one.count} × {' '.join(filter(None, (one.where or estimate.model.name, one.op)))}"
        )
        formula = " = ".join(filter(None, (one.letters, one.figures, with_unit(one.each))))
        lines.append(
            f"      {formula}" + (f", in all {with_unit(one.total)}" if one.count > 1 else "")
        )
        used += one.letters
    lines += [
        "",
        f"rounding  {with_unit(estimate.memory.parts.get('rounding', 0))}",
        "  rounding by the allocator: blocks are multiples of 512 B",
    ]
    if estimate.memory.fragmentation is not None:
        lines += [
            "",
            f"fragmentation  {gib(estimate.memory.fragmentation)} GiB",
            "  peak of reserved minus peak of allocated, by replaying the allocator",
        ]
    span, links = estimate.context, estimate.nccl
    lines += [
        "",
        f"context  {gib(middle(span))} GiB",
        f"  middle of {gib(span.low)} to {gib(span.high)} GiB ({span.cite})",
    ]
    if estimate.strategy:
        groups = ", ".join(f"{name} of {ranks}" for name, ranks, _ in estimate.strategy.groups)
        lines += [
            "",
            f"nccl  {gib(middle(links))} GiB",
            (
                f"  communicators: {groups}; middle of {gib(links.low)} to "
                f"{gib(links.high)} GiB ({links.cite})"
            ),
        ]
    lines += [
        "",
        f"band  {gib(estimate.band.low)} to {gib(estimate.band.high)} GiB",
        f"  {estimate.band.origin}",
    ]
    known = [f"{letter} {meaning}" for letter, meaning in LEGEND.items() if letter in used]
    return "\n".join(
        folded for line in [*lines, "", *known, *timing(estimate)] for folded in fold(line, width)
    )


def fold(line: str, width: int) -> list[str]:
    indent = len(line) - len(line.lstrip()) + 2
    return textwrap.wrap(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    ) or [line]


def _letters(estimate: Estimate) -> dict[int, tuple[tuple[str, int], ...]]:
    """What a bare number in a formula stands for. Where two sizes of a model are equal, the first
    one named here wins."""
    model, job = estimate.model, estimate.job
    found: dict[int, tuple[tuple[str, int], ...]] = {}
    for letters in _sizes(model):
        found.setdefault(prod(value for _, value in letters), letters)
    for length in (job.reach, job.seq):
        found.setdefault(job.batch * length, (("B", job.batch), ("S", length)))
    if job.adapters:
        found.setdefault(job.rank, (("R", job.rank),))
    return {
        value: letters for value, letters in found.items() if value > 8
    }  # a small number may be anything


def _sizes(model: Model) -> Iterator[tuple[tuple[str, int], ...]]:
    yield (("D", model.width),)
    yield (("V", model.vocab),)
    mixers = [block.mixer for layer in dict.fromkeys(model.layers) for block in layer.blocks]
    for mixer in mixers:
        match mixer:
            case MLP():
                yield (("F", mixer.width),)
                if mixer.fused:
                    yield (("2", 2), ("F", mixer.width))
            case MoE():
                yield (("F", mixer.width),)
                yield (("2", 2), ("F", mixer.width))
                yield (("E", mixer.experts),)
            case Attention():
                yield (("N", mixer.heads), ("H", mixer.head))
                yield (("K", mixer.kv_heads), ("H", mixer.head))
                yield (("N", mixer.heads),)
                yield (("K", mixer.kv_heads),)
                yield (("H", mixer.head),)


def _formula(group: Group, letters: dict[int, tuple[tuple[str, int], ...]]) -> tuple[str, str]:
    """(`B·S·F·2`, `1·2048·14336·2`); a text of the tracer stays a text, and a lone number is no
    formula."""
    if isinstance(group.formula, str):
        return group.formula, ""
    if len(group.formula) < 2:
        return "", ""
    known: list[tuple[str, int]] = []
    for factor in group.formula[:-1]:
        letter = getattr(factor, "letter", "")
        known += (
            [(letter, int(factor))] if letter else letters.get(factor, ((str(factor), factor),))
        )
    symbols = "·".join([name for name, _ in known] + [str(group.formula[-1])])
    figures = "·".join([str(value) for _, value in known] + [str(group.formula[-1])])
    if prod(group.formula) != group.size:
        return f"{'·'.join(name for name, _ in known)} values, packed", ""
    return (symbols, figures) if symbols != figures else (figures, "")
