"""A study as a picture: memory and time of every way, a field each, shaded by how much of the GPU
it takes and how long it lasts; an SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from memfit.plan.study import Cell, Panel, Study
from memfit.report.figures import gib
from memfit.report.study import columns, rows, title

LABEL, FIELD, LINE, GAP, HEAD, EDGE = 150, 100, 22, 40, 64, 20
PALE, DEEP, HOT, NONE = (239, 246, 252), (8, 81, 156), (203, 24, 29), "#f2f2f2"


def svg(found: Study) -> str:
    """Two fields side by side for each panel: left GiB, right seconds. Red does not fit; grey was
    refused or has no time."""
    wide = max((len(columns(panel)) for panel in found.panels), default=1)
    width = 2 * EDGE + 2 * (LABEL + wide * FIELD) + GAP
    tops, y = [], EDGE + 30
    for panel in found.panels:
        tops.append(y)
        y += HEAD + len(rows(panel)) * LINE + GAP
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="#222"'
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" {style} '
            'role="img" aria-label="memory and time of ways to fine-tune">'
        ),
        f'<rect width="{width}" height="{y}" fill="#fff"/>',
        (
            f'<text x="{EDGE}" y="{EDGE + 8}" font-size="16" '
            'font-weight="600">memfit study: GiB per GPU (left), seconds per step '
            "(right)</text>"
        ),
    ]
    for panel, top in zip(found.panels, tops, strict=True):
        lines += drawn(panel, top, EDGE + LABEL + wide * FIELD + GAP)
    return "\n".join([*lines, "</svg>", ""])


def drawn(panel: Panel, top: int, right: int) -> Iterator[str]:
    yield f'<text x="{EDGE}" y="{top + 14}" font-weight="600">{escape(title(panel))}</text>'
    times = [cell.seconds for cell in panel.cells if cell.seconds and cell.verdict != "no"]
    scale = (min(times), max(times)) if times else (1.0, 1.0)
    for left, timed in ((EDGE, False), (right, True)):
        for place, name in enumerate(columns(panel)):
            middle = left + LABEL + (place + 0.5) * FIELD
            yield (
                f'<text x="{middle}" y="{top + HEAD - 12}" text-anchor="middle" '
                f'font-size="10">{escape(name)}</text>'
            )
        for line, (label, cells) in enumerate(rows(panel).items()):
            y = top + HEAD + line * LINE
            yield f'<text x="{left}" y="{y + 15}">{escape(" · ".join(label.split()))}</text>'
            for place, name in enumerate(columns(panel)):
                if name in cells:
                    yield from one(
                        cells[name],
                        panel,
                        (left + LABEL + place * FIELD, y),
                        scale if timed else None,
                    )


def one(
    cell: Cell, panel: Panel, at: tuple[float, float], scale: tuple[float, float] | None
) -> Iterator[str]:
    """One field with its figure; its title has the details."""
    x, y = at
    if scale is None:
        share = None if cell.refused else cell.device / panel.usable
        said = "" if cell.refused else gib(cell.device)
        colour = (
            NONE
            if share is None
            else shade(HOT, 1.0)
            if cell.verdict == "no"
            else shade(DEEP, share)
        )
    else:
        known = cell.seconds if not cell.refused and cell.verdict != "no" else None
        share = None if known is None else place_of(known, scale)
        said = "" if known is None else f"{known:.3g}"
        colour = NONE if share is None else shade(DEEP, share)
    dark = share is not None and (share > 0.55 or (scale is None and cell.verdict == "no"))
    told = (
        cell.refused
        or f"{cell.way.method}, {cell.way.layout}: {gib(cell.device)} GiB, {cell.verdict}"
    )
    yield (
        f'<rect x="{x}" y="{y}" width="{FIELD - 2}" height="{LINE - 2}" '
        f'fill="{colour}"><title>{escape(told)}</title></rect>'
    )
    yield (
        f'<text x="{x + FIELD / 2 - 1}" y="{y + 15}" text-anchor="middle" '
        f'fill="{"#fff" if dark else "#222"}">{said}</text>'
    )


def place_of(value: float, scale: tuple[float, float]) -> float:
    """Between the quickest and the slowest, on a logarithmic scale."""
    low, high = scale
    return math.log(value / low) / math.log(high / low) if high > low else 0.0


def shade(deep: tuple[int, int, int], share: float) -> str:
    share = max(0.0, min(1.0, share))
    return "#" + "".join(
        f"{round(a + (b - a) * share):02x}" for a, b in zip(PALE, deep, strict=True)
    )


__all__ = ["svg"]
