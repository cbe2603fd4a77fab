"""The memory of a run drawn over its events: what is alive, stacked by part, below what the
allocator holds; phases are marked."""

from __future__ import annotations

import html
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from memfit.errors import InputError, MissingExtra
from memfit.estimate import Estimate
from memfit.lazy_dataclass import dataclass
from memfit.report.figures import phase
from memfit.report.peak import table
from memfit.report.text import place
from memfit.simulate.allocator import Allocator
from memfit.simulate.settings import Settings
from memfit.tape import Alloc, Free, Mark, Tape
from memfit.units import GIB, MIB

COLUMNS = 720  # points of a curve
TABLE = 110  # characters of the list below it
WIDTH, HEIGHT = 980, 460
LEFT, RIGHT, TOP, BOTTOM = 62, 170, 54, 40
# From the bottom up: what stays, then what comes and goes. Colours can be told apart by
# colour-blind eyes (after Okabe and Ito).
COLOURS = {
    "weights": "#0072b2",
    "master": "#004c77",
    "optimizer": "#56b4e9",
    "gradients": "#009e73",
    "buffers": "#5f6b6d",
    "kv_cache": "#006b4f",
    "workspace": "#999999",
    "activations": "#e69f00",
    "inputs": "#8c6d31",
    "logits": "#d55e00",
    "communication": "#332288",
    "temporaries": "#cc79a7",
}


class Band(NamedTuple):
    """One phase of one step, from column to column."""

    phase: str
    step: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Curves:
    """One value for each column: of the event in it with the most alive, so that no peak is
    lost."""

    parts: dict[str, list[int]]
    reserved: list[int]
    bands: list[Band]
    events: int

    @property
    def totals(self) -> list[int]:
        return [sum(column) for column in zip(*self.parts.values(), strict=True)]


def curves(tape: Tape, settings: Settings, columns: int = COLUMNS) -> Curves:
    """Blocks are rounded up to 512 bytes. `activations` that end in the phase they began in are
    `temporaries`, as in the report."""
    passing = passing_blocks(tape)
    count = sum(isinstance(event, (Alloc, Free)) for event in tape)
    columns = max(1, min(columns, count))
    allocator = Allocator(settings, total=None if settings.memory_fraction >= 1 else 1 << 62)
    live = dict.fromkeys(COLOURS, 0)
    best: list[tuple[int, dict[str, int]]] = [(-1, {})] * columns
    reserved = [0] * columns
    sizes: dict[int, Any] = {}
    bands: list[Any] = []
    total = index = 0
    for event in tape:
        column = min(index * columns // max(1, count), columns - 1)
        if isinstance(event, Mark):
            if not bands or (bands[-1].phase, bands[-1].step) != (event.phase, event.step):
                bands.append(Band(event.phase, event.step, column, column))
            continue
        if isinstance(event, Alloc):
            part = "temporaries" if event.id in passing else event.part
            sizes[event.id] = (part, event.size + 511 & -512)
            allocator.malloc(event.id, event.size, event.stream)
            live[part] += sizes[event.id][1]
            total += sizes[event.id][1]
        elif isinstance(event, Free):
            part, size = sizes.pop(event.id)
            allocator.free(event.id)
            live[part] -= size
            total -= size
        else:
            continue
        index += 1
        if total > best[column][0]:
            best[column] = (total, dict(live))
        reserved[column] = max(reserved[column], allocator.reserved)
    parts = {name: [held.get(name, 0) for _, held in best] for name in COLOURS}
    ends = [band.first for band in bands[1:]] + [columns]
    bands = [band._replace(last=end) for band, end in zip(bands, ends, strict=True)]
    return Curves(
        parts={name: row for name, row in parts.items() if any(row)},
        reserved=reserved,
        bands=bands,
        events=count,
    )


def passing_blocks(tape: Tape) -> set[int]:
    found, born, now = set(), {}, ("", 0)
    for event in tape:
        if isinstance(event, Mark):
            now = (event.phase, event.step)
        elif isinstance(event, Alloc) and event.part == "activations":
            born[event.id] = now
        elif isinstance(event, Free) and born.get(event.id) == now:
            found.add(event.id)
    return found


def draw(estimate: Estimate, path: Path) -> None:
    """Into a file of the kind that its name says: .svg, .png or .html."""
    drawn = curves(
        estimate.memory.tape, Settings.parse(estimate.job.alloc_conf, where="job.alloc_conf")
    )
    kind = path.suffix.lower()
    try:
        if kind == ".png":
            png(estimate, drawn, path)
        else:
            path.write_text(
                page(estimate, drawn) if kind == ".html" else svg(estimate, drawn), encoding="utf-8"
            )
    except OSError as error:
        raise InputError.one(
            f"`{path}` cannot be written: {(error.strerror or 'unknown failure').lower()}",
            where="timeline",
        ) from None


# ----------------------------------------------------------------------------------------- the SVG
class Scale(NamedTuple):
    """From columns and bytes to the drawing."""

    columns: int
    top: int
    unit: int
    word: str

    def x(self, column: float) -> float:
        return LEFT + column * (WIDTH - LEFT - RIGHT) / max(1, self.columns)

    def y(self, size: float) -> float:
        return HEIGHT - BOTTOM - size * (HEIGHT - TOP - BOTTOM) / self.top


def scale_of(estimate: Estimate, drawn: Curves) -> Scale:
    highest = max([*drawn.totals, *drawn.reserved, 1])
    room = limit(estimate)
    if room is not None and room < 1.5 * highest:
        highest = max(highest, room)
    unit, word = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    return Scale(len(drawn.reserved), highest * 21 // 20 + 1, unit, word)


def limit(estimate: Estimate) -> int | None:
    """Bytes left for the allocator next to the CUDA context."""
    return None if estimate.usable is None else estimate.usable[0] - estimate.outside


def svg(estimate: Estimate, drawn: Curves) -> str:
    scale = scale_of(estimate, drawn)
    body = [
        *frame(estimate, scale),
        *areas(drawn, scale),
        *bands(drawn, scale),
        *lines(estimate, drawn, scale),
        *legend(estimate, drawn, scale),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="11">'
    )
    return "\n".join(
        [head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *body, "</svg>", ""]
    )


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    colour: str = "#222",
    size: int = 11,
    bold: bool = False,
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}"{weight}>{html.escape(words)}</text>'
    )


def frame(estimate: Estimate, scale: Scale) -> Iterator[str]:
    """Title, axes and ticks."""
    title = estimate.model.name  # of a script its file's
    where = f" on {estimate.gpu.name}" if estimate.gpu is not None else ""
    size = f"{estimate.memory.allocated / scale.unit:.2f} {scale.word}"
    yield text(LEFT, 20, f"{title}{where}: {size} allocated at the peak", size=13, bold=True)
    step = tick(scale.top / scale.unit)
    value = 0.0
    while value * scale.unit <= scale.top:
        y = scale.y(value * scale.unit)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield text(LEFT - 6, y + 4, f"{value:g}", anchor="end", colour="#555")
        value += step
    yield text(LEFT - 6, TOP - 8, scale.word, anchor="end", colour="#555")
    yield text(
        (LEFT + WIDTH - RIGHT) / 2,
        HEIGHT - 10,
        "allocations and frees, in order",
        anchor="middle",
        colour="#555",
    )


def tick(highest: float) -> float:
    """A round step that gives four to ten ticks."""
    step = 1.0
    while highest / step > 10:
        step *= 2 if str(step)[0] in "15" else 2.5
    while highest / step < 4:
        step /= 2
    return step


def areas(drawn: Curves, scale: Scale) -> Iterator[str]:
    below = [0] * scale.columns
    for name, row in drawn.parts.items():
        above = [low + size for low, size in zip(below, row, strict=True)]
        there = [f"{scale.x(at + 0.5):.1f},{scale.y(size):.1f}" for at, size in enumerate(above)]
        back = [
            f"{scale.x(at + 0.5):.1f},{scale.y(size):.1f}"
            for at, size in reversed(list(enumerate(below)))
        ]
        yield (
            f'<polygon fill="{COLOURS[name]}" '
            f'points="{" ".join(there + back)}"><title>{html.escape(name)}</title></polygon>'
        )
        below = above


def bands(drawn: Curves, scale: Scale) -> Iterator[str]:
    """A line where a phase begins; its name where there is room for it."""
    for number, band in enumerate(drawn.bands):
        left, right = scale.x(band.first), scale.x(band.last)
        if right - left < 1:
            continue
        shade = "#f0f0f0" if number % 2 else "#e2e6ea"
        yield (
            f'<rect x="{left:.1f}" y="{TOP - 20}" width="{right - left:.1f}" height="16" '
            f'fill="{shade}"><title>{name_of(band)}</title></rect>'
        )
        yield (
            f'<line x1="{left:.1f}" x2="{left:.1f}" y1="{TOP - 20}" y2="{HEIGHT - BOTTOM}" '
            'stroke="#000" stroke-opacity="0.18"/>'
        )
        for words in (name_of(band), phase(band.phase), band.phase):
            if len(words) * 5.9 < right - left - 2:
                yield text(
                    (left + right) / 2, TOP - 8, words, anchor="middle", colour="#333", size=10
                )
                break


def name_of(band: Band) -> str:
    return (
        f"{phase(band.phase)} {band.step + 1}"
        if band.phase in ("forward", "backward", "step")
        else phase(band.phase)
    )


def lines(estimate: Estimate, drawn: Curves, scale: Scale) -> Iterator[str]:
    """What the allocator holds, where the GPU is full, and the peak."""
    points = " ".join(
        f"{scale.x(at + 0.5):.1f},{scale.y(size):.1f}" for at, size in enumerate(drawn.reserved)
    )
    yield f'<polyline fill="none" stroke="#000" stroke-width="1.2" points="{points}"/>'
    room = limit(estimate)
    if room is not None and room <= scale.top:
        y = scale.y(room)
        yield (
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#c00" '
            'stroke-width="1.5" stroke-dasharray="6 4"/>'
        )
    totals = drawn.totals
    at = totals.index(max(totals))
    yield (
        f'<circle cx="{scale.x(at + 0.5):.1f}" cy="{scale.y(totals[at]):.1f}" r="4" '
        'fill="none" stroke="#000" stroke-width="1.5"/>'
    )


def legend(estimate: Estimate, drawn: Curves, scale: Scale) -> Iterator[str]:
    """From the top down as the areas lie, with their sizes at the peak; then what the lines are."""
    x, y = WIDTH - RIGHT + 14, TOP + 4
    at = drawn.totals.index(max(drawn.totals))
    yield text(x, y, f"at the peak, {scale.word}", colour="#555")
    for name, row in reversed(drawn.parts.items()):
        y += 17
        yield f'<rect x="{x}" y="{y - 9}" width="11" height="11" fill="{COLOURS[name]}"/>'
        yield text(x + 17, y, name)
        yield text(WIDTH - 12, y, f"{row[at] / scale.unit:.2f}", anchor="end")
    rows = [("#000", "", "reserved by the allocator", max(drawn.reserved))]
    room = limit(estimate)
    if room is not None and room <= scale.top:
        rows.append(("#c00", ' stroke-dasharray="4 3"', "available besides the context", room))
    for colour, dash, words, size in rows:
        y += 22
        yield (
            f'<line x1="{x}" x2="{x + 12}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" '
            f'stroke-width="1.5"{dash}/>'
        )
        yield text(x + 17, y, words)
        yield text(WIDTH - 12, y + 13, f"{size / scale.unit:.2f}", anchor="end")
        y += 8
    y += 26
    if estimate.memory.at is not None:
        named = (
            place(estimate.memory.at, estimate).replace(".default", "").replace("_", "_ ")
        )  # a long name may break behind these
        for words in textwrap.wrap("peak: " + named, 26)[:6]:
            yield text(x, y, words.replace("_ ", "_"), colour="#555", size=10)
            y += 13


# --------------------------------------------------------------------------------- the other kinds
PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body{{font:14px system-ui,sans-serif;margin:1.5em;max-width:{width}px}}
#at{{min-height:3em;color:#333}}
svg{{max-width:100%;height:auto}}
pre{{background:#f6f8fa;padding:1em;overflow:auto}}
</style></head><body>
{svg}
<p id="at">Point at the picture to read it off.</p>
<pre>{table}</pre>
<script>
const d = {data};
const svg = document.querySelector("svg"), at = document.getElementById("at");
const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
const look = {{stroke: "#000", "stroke-dasharray": "2 2", visibility: "hidden"}};
for (const [k, v] of Object.entries({{y1: d.top, y2: d.bottom, ...look}})) line.setAttribute(k, v);
svg.appendChild(line);
svg.addEventListener("mousemove", e => {{
  const p = new DOMPoint(e.clientX, e.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const n = d.reserved.length, c = Math.floor((p.x - d.left) / (d.right - d.left) * n);
  if (c < 0 || c >= n) return;
  line.setAttribute("x1", p.x); line.setAttribute("x2", p.x);
  line.setAttribute("visibility", "visible");
  const alive = Object.entries(d.parts).filter(([, row]) => row[c] > 0);
  const parts = alive.sort((a, b) => b[1][c] - a[1][c]);
  const sum = parts.reduce((s, [, row]) => s + row[c], 0);
  const band = d.bands.filter(b => b[1] <= c).pop();
  at.textContent = (band ? band[0] + ": " : "") + (sum / d.unit).toFixed(2) + " " + d.word +
    " alive, " + (d.reserved[c] / d.unit).toFixed(2) + " held; " +
    parts.map(([name, row]) => name + " " + (row[c] / d.unit).toFixed(2)).join(", ");
}});
</script></body></html>
"""


def page(estimate: Estimate, drawn: Curves) -> str:
    """An HTML page with the SVG, readable values, and the list of tensors alive at the peak."""
    scale = scale_of(estimate, drawn)
    data = {
        "parts": drawn.parts,
        "reserved": drawn.reserved,
        "bands": [[name_of(band), band.first] for band in drawn.bands],
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
        "unit": scale.unit,
        "word": scale.word,
    }
    title = html.escape(estimate.model.name)
    safe = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return PAGE.format(
        title=title,
        width=WIDTH,
        svg=svg(estimate, drawn),
        table=html.escape(table(estimate, TABLE)),
        data=safe,
    )


def png(estimate: Estimate, drawn: Curves, path: Path) -> None:
    """With matplotlib, if it is there."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("a PNG of the timeline", "plot") from None
    scale = scale_of(estimate, drawn)
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    columns = range(scale.columns)
    rows = [[size / scale.unit for size in row] for row in drawn.parts.values()]
    axes.stackplot(
        columns, *rows, labels=list(drawn.parts), colors=[COLOURS[name] for name in drawn.parts]
    )
    axes.plot(
        columns,
        [size / scale.unit for size in drawn.reserved],
        color="black",
        linewidth=1,
        label="reserved by the allocator",
    )
    room = limit(estimate)
    if room is not None and room <= scale.top:
        axes.axhline(
            room / scale.unit, color="#c00", linestyle="--", label="available besides the context"
        )
    for band in drawn.bands:
        axes.axvline(band.first, color="black", alpha=0.15, linewidth=0.8)
        if (band.last - band.first) / scale.columns > 0.05:
            axes.text(
                (band.first + band.last) / 2,
                1.01,
                name_of(band),
                transform=axes.get_xaxis_transform(),
                ha="center",
                fontsize=7,
            )
    axes.set(
        xlim=(0, scale.columns - 1),
        ylim=(0, scale.top / scale.unit),
        ylabel=scale.word,
        xlabel="allocations and frees, in order",
    )
    axes.set_xticks([])
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, reverse=True)
    figure.savefig(path)


__all__ = ["COLOURS", "Curves", "curves", "draw", "page", "svg"]
