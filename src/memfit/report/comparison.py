"""Estimates side by side: the memory of each variant, and which parts differ."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from memfit.estimate import Estimate
from memfit.report import markdown
from memfit.report.codec import to_dict
from memfit.report.figures import VERDICTS, gib
from memfit.report.text import large_parts

Variants = Sequence[tuple[str, Estimate]]
LABEL, COLUMN = 16, 15
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def text(variants: Variants, *, width: int = 80) -> str:
    """A legend of the variants, then one column each; columns that do not fit the width continue
    below."""
    fit = max(1, (width - LABEL) // COLUMN)
    blocks = ["\n".join(legend(variants, width))]
    for first in range(0, len(variants), fit):
        some = range(first, min(first + fit, len(variants)))
        rows = [
            ("", [LETTERS[at] for at in some]),
            *((name, [cells[at] for at in some]) for name, cells in lines(variants)),
        ]
        blocks.append(
            "\n".join(
                f"{name:<{LABEL}}" + "".join(f"{cell:>{COLUMN}}" for cell in cells)
                for name, cells in rows
            )
        )
    return "\n\n".join(blocks)


def legend(variants: Variants, width: int) -> Iterator[str]:
    for letter, (words, _) in zip(LETTERS, variants, strict=False):
        yield from textwrap.wrap(
            f"{letter}  {words}",
            width,
            subsequent_indent="   ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def lines(variants: Variants) -> Iterator[tuple[str, list[str]]]:
    """(what, a cell for each variant)."""
    found = [one for _, one in variants]
    yield "verdict", [VERDICTS[one.verdict] for one in found]
    yield "device GiB", [gib(one.device) for one in found]
    yield "from", [gib(one.band.low) for one in found]
    yield "to", [gib(one.band.high) for one in found]
    if any(one.memory.reserved is not None for one in found):
        yield (
            "reserved",
            ["" if one.memory.reserved is None else gib(one.memory.reserved) for one in found],
        )
    yield "allocated", [gib(one.memory.allocated) for one in found]
    parts = [large_parts(one) for one in found]
    order = sorted(
        {name for one in parts for name in one},
        key=lambda name: (-max(one.get(name, 0) for one in parts), name),
    )
    for name in order:
        yield f"  {name}", [gib(one[name]) if one.get(name) else "" for one in parts]
    if any(one.usable is not None for one in found):
        yield "usable", ["" if one.usable is None else gib(one.usable[0]) for one in found]
    yield "host", [gib(one.host.size) for one in found]
    if any(one.host.node for one in found):
        yield "  pinned, a node", [gib(one.host.node) if one.host.node else "" for one in found]
    yield "peak in", ["" if one.memory.at is None else one.memory.at.phase for one in found]
    if any(one.strategy for one in found):
        yield "GPUs", [str(one.strategy.ranks) for one in found]
        yield "worst rank", [str(one.strategy.rank) for one in found]


def table(variants: Variants) -> str:
    named = [
        f"- {letter}: `{words}`" for letter, (words, _) in zip(LETTERS, variants, strict=False)
    ]
    head = ("", *LETTERS[: len(variants)])
    return "\n".join(
        [
            *named,
            "",
            *markdown.table(head, ((name.strip(), *cells) for name, cells in lines(variants))),
        ]
    )


def data(variants: Variants) -> dict[str, Any]:
    return {
        "schema": 1,
        "variants": [{"words": words, "estimate": to_dict(one)} for words, one in variants],
    }
