"""Predicted against measured, a point a case, on logarithmic axes: an SVG that needs nothing but a
viewer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from memfit.report.figures import gib
from memfit.truth.accuracy import Accuracy, Outcome
from memfit.truth.case import METRICS
from memfit.units import GIB

WIDTH, HEIGHT = 860, 620
LEFT, RIGHT, TOP, BOTTOM = 70, 240, 50, 60
# Told apart in every common kind of colour blindness (Okabe and Ito), and by shape.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#8c6d00")
NEAR = 1.1  # the dashed lines: ten per cent off
TICKS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def svg(found: Accuracy) -> str:
    """A scatter plot, sources by colour and shape. The legend has the number of cases beyond the
    dashed lines."""
    cases = [one for one in found.outcomes if one.case.value and one.predicted > 0]
    style = 'font-family="system-ui, sans-serif" font-size="13" fill="#222"'
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style} '
            'role="img" aria-label="predicted and measured memory">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        (
            f'<text x="{LEFT}" y="28" font-size="16" font-weight="600">memfit: predicted '
            f"against measured memory, {len(cases)} cases</text>"
        ),
    ]
    if cases:
        scale = Scale(cases)
        lines += [*grid(scale), *points(scale, cases), *legend(cases)]
    return "\n".join([*lines, "</svg>", ""])


class Scale:
    """From bytes to the drawing, the same on both axes."""

    def __init__(self, cases: list[Outcome]) -> None:
        sizes = [size / GIB for one in cases for size in (one.case.value or 1, one.predicted)]
        self.low, self.high = 0.85 * min(sizes), 1.18 * max(sizes)

    def share(self, size: float) -> float:
        return (math.log(size) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))

    def x(self, size: float) -> float:
        return LEFT + self.share(size) * (WIDTH - LEFT - RIGHT)

    def y(self, size: float) -> float:
        return HEIGHT - BOTTOM - self.share(size) * (HEIGHT - TOP - BOTTOM)


def grid(scale: Scale) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for tick in (one for one in TICKS if scale.low <= one <= scale.high):
        x, y = scale.x(tick), scale.y(tick)
        yield f'<path d="M{x:.1f} {TOP}V{bottom}M{LEFT} {y:.1f}H{right}" stroke="#e4e4e4"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    yield (
        f'<rect x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{bottom - TOP}" '
        'fill="none" stroke="#888"/>'
    )
    for factor, dash in (
        (1, ""),
        (NEAR, ' stroke-dasharray="5 4"'),
        (1 / NEAR, ' stroke-dasharray="5 4"'),
    ):
        first, last = scale.low * max(1, 1 / factor), scale.high / max(1, factor)
        ends = (
            f"M{scale.x(first):.1f} {scale.y(first * factor):.1f}L{scale.x(last):.1f} "
            f"{scale.y(last * factor):.1f}"
        )
        yield f'<path d="{ends}" stroke="#888" fill="none"{dash}/>'
    yield (
        f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 16}" '
        'text-anchor="middle">measured, GiB</text>'
    )
    middle = (TOP + bottom) / 2
    yield (
        f'<text x="20" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 20 '
        f'{middle:.0f})">predicted, GiB</text>'
    )


def sources(cases: list[Outcome]) -> list[str]:
    """Those with most cases first, so that few points hide many."""
    counts: dict[str, int] = {}
    for one in cases:
        counts[one.case.source] = counts.get(one.case.source, 0) + 1
    return sorted(counts, key=lambda name: -counts[name])


def points(scale: Scale, cases: list[Outcome]) -> Iterator[str]:
    for place, source in enumerate(sources(cases)):
        yield f'<g fill="{COLOURS[place % len(COLOURS)]}" fill-opacity="0.65">'
        for one in cases:
            if one.case.source == source:
                x, y = scale.x((one.case.value or 1) / GIB), scale.y(one.predicted / GIB)
                yield mark(place, x, y, title(one))
        yield "</g>"


def title(one: Outcome) -> str:
    case = one.case
    words = (
        f"{case.id}: {case.model}, {METRICS.get(case.metric, case.metric)}: measured "
        f"{gib(case.value or 0)}, predicted {gib(one.predicted)} GiB"
    )
    return escape(words)


def mark(place: int, x: float, y: float, words: str = "") -> str:
    """A circle, a square, a triangle, a diamond, and so on in turn."""
    told = f"<title>{words}</title>" if words else ""
    match (place + place // len(COLOURS)) % 4:  # another one, where a colour comes again
        case 0:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4">{told}</circle>'
        case 1:
            return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7">{told}</rect>'
        case 2:
            return f'<path d="M{x:.1f} {y - 4.6:.1f}l4.4 8h-8.8z">{told}</path>'
        case _:
            return f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z">{told}</path>'


def legend(cases: list[Outcome]) -> Iterator[str]:
    x = WIDTH - RIGHT + 24
    for place, source in enumerate(sources(cases)):
        mine = [one for one in cases if one.case.source == source]
        far = sum(not 1 / NEAR <= one.predicted / (one.case.value or 1) <= NEAR for one in mine)
        y = TOP + 16 + 40 * place
        yield f'<g fill="{COLOURS[place % len(COLOURS)]}">{mark(place, x, y - 4)}</g>'
        yield f'<text x="{x + 14}" y="{y}">{escape(source.rpartition("/")[2][:28])}</text>'
        yield (
            f'<text x="{x + 14}" y="{y + 16}" font-size="11" fill="#666">{len(mine)} cases, '
            f"{far} more than 10 % off</text>"
        )
    y = HEIGHT - BOTTOM - 20
    yield (
        f'<path d="M{x - 6} {y}h16" stroke="#888"/><text x="{x + 14}" y="{y + 4}" '
        'font-size="11">equal</text>'
    )
    dash = f'<path d="M{x - 6} {y + 18}h16" stroke="#888" stroke-dasharray="5 4"/>'
    yield f'{dash}<text x="{x + 14}" y="{y + 22}" font-size="11">10 % off</text>'


__all__ = ["svg"]
