"""A study as text, Markdown and JSON: two tables for every model, machine and length, and what to
begin with."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memfit.commands import command, gpu_words
from memfit.plan.study import Cell, Default, Matrix, Panel, Study, Way, fused, numbers, strategy
from memfit.report import markdown as marked
from memfit.report.figures import gib
from memfit.report.text import assumed_words
from memfit.truth.published_cells import Beside

LABEL, COLUMN = 20, 10
SHORT = {"ZeRO-2 + offload": "2+offload", "ZeRO-3 + offload": "3+offload"}
KERNELS = {"flash-attn-2": "flash"}
METHODS = {"full": "Full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
LEGEND = (
    "! does not fit, ~ may fit, * fastest of its method that fits, - not supported. GiB: device "
    "memory of the worst rank. Rows: method, gradient checkpointing (ckpt) or none, attention."
)
APART = (
    "Full fine-tuning, LoRA and QLoRA train different weights. This compares their cost, not what "
    "the model learns."
)
Measured = Mapping[tuple[str, str, int, int], Sequence[tuple[Way, Beside]]]
REASONS = 2  # that are shown where nothing is supported


def text(found: Study, beside: Measured, *, width: int = 80) -> str:
    blocks = ["\n".join(conclusions(found, width)), "\n".join(setting(found, width))]
    blocks += [
        panel for one in found.panels for panel in panel_text(one, beside.get(key(one), ()), width)
    ]
    blocks.append("\n".join(textwrap.wrap(LEGEND, width)))
    if not found.whole:
        blocks.append("Ctrl-C stopped the study: it has the cells computed so far")
    return "\n\n".join(filter(None, blocks))


def conclusions(found: Study, width: int) -> Iterator[str]:
    """What to begin with, of each method: methods learn different things, and so they are not
    compared with each other."""
    several, situation = len({one.method for one in found.defaults}) > 1, ""
    for one in found.defaults:
        if several and not one.method:
            continue
        if len(found.panels) > 1 and one.situation != situation:
            situation = one.situation
            yield f"{situation}, {one.cases} case{'' if one.cases == 1 else 's'}"
        alone = found.panels[0] if len(found.panels) == 1 else None
        words = default_words(one, found.matrix) if alone is None else best_words(one, alone)
        method = METHODS[one.method or found.matrix.methods[0]]
        yield from textwrap.wrap(f"{method} {words}", width, subsequent_indent="  ")
        if alone is not None and (cell := cell_of(one, alone)) is not None:
            yield f"  {asking(found, alone, cell)}"
    if several:
        yield from textwrap.wrap(APART, width)


def setting(found: Study, width: int) -> Iterator[str]:
    """The defaults that nobody named."""
    matrix = found.matrix
    if not matrix.assumed:
        return
    job = matrix.base.replace(seq=matrix.lengths[0])
    words = [assumed_words(job, {*matrix.assumed, "seq"} - {"checkpointing"})]
    if not matrix.precision:
        each: dict[str, list[str]] = {}
        for method in matrix.methods:
            each.setdefault(numbers(method, matrix.clusters[0]), []).append(method)
        said = [f"{name} ({', '.join(some)})" for name, some in each.items()]
        words.append(f"--precision {', '.join(said) if len(said) > 1 else next(iter(each))}")
    yield from textwrap.wrap(f"assumed: {' '.join(words)}", width, subsequent_indent="  ")


def cell_of(one: Default, panel: Panel) -> Cell | None:
    """The cell that a recommendation for this panel means."""
    return next((cell for cell in panel.cells if cell.fits and fused(cell.way) == one.way), None)


def best_words(one: Default, panel: Panel) -> str:
    """`fits with ZeRO-2, checkpointing and sdpa attention: 21.4 of 79.1 GiB, 0.58 s per step`."""
    cell, room = cell_of(one, panel), gib(panel.usable)
    if cell is None:
        some = [
            each for each in panel.cells if not each.refused and one.method in ("", each.way.method)
        ]
        if not some:
            why = dict.fromkeys(
                each.refused for each in panel.cells if one.method in ("", each.way.method)
            )
            return "is not supported in any way of this study: " + "; ".join(list(why)[:REASONS])
        least = min(some, key=lambda each: (each.verdict != "tight", each.device))
        if least.verdict == "tight":
            return f"is tight {words(least.way)}: {gib(least.device)} of {room} GiB"
        return f"does not fit: the smallest configuration needs {gib(least.device)} GiB of {room}"
    took = "" if cell.seconds is None else f", {cell.seconds:.3g} s per step"
    return f"fits {words(cell.way)}: {gib(cell.device)} of {room} GiB{took}"


def asking(found: Study, panel: Panel, cell: Cell) -> str:
    """The command that asks for this cell alone."""
    model = next(one for one in found.matrix.models if one.name == panel.model)
    job = found.matrix.job(cell.way, panel.cluster, panel.seq)
    layout = strategy(cell.way, panel.cluster)
    place, half = gpu_words(panel.cluster), panel.cluster.gpu.half
    return command(model.name, job, place, layout, model.config, half)


def key(panel: Panel) -> tuple[str, str, int, int]:
    return panel.model, panel.cluster.gpu.id, panel.cluster.gpus, panel.seq


def title(panel: Panel) -> str:
    gpus = f"{panel.cluster.gpus} x " if panel.cluster.gpus > 1 else ""
    return (
        f"{panel.model}, {panel.batch} x {panel.seq} tokens per GPU, "
        f"on {gpus}{panel.cluster.gpu.name} ({gib(panel.usable)} GiB usable)"
    )


def panel_text(panel: Panel, beside: Sequence[tuple[Way, Beside]], width: int) -> Iterator[str]:
    layouts = columns(panel)
    head = "".join(f"{SHORT.get(name, name):>{COLUMN}}" for name in layouts)
    yield "\n".join(textwrap.wrap(title(panel), width))
    yield "\n".join(
        [
            f"{'GiB':<{LABEL}}{head}",
            *(f"{row:<{LABEL}}{cells}" for row, cells in body(panel, layouts, size)),
        ]
    )
    quick = quickest(panel)
    timed = body(panel, layouts, lambda cell: seconds(cell, cell in quick))
    yield "\n".join(
        [
            f"{'seconds per step':<{LABEL}}{head}",
            *(f"{row:<{LABEL}}{cells}" for row, cells in timed),
        ]
    )
    lines = [
        line
        for reason in refusals(panel)
        for line in textwrap.wrap(f"- {reason}", width, subsequent_indent="  ")
    ]
    if lines:
        yield "\n".join(lines)
    if beside:
        yield "\n".join(
            line
            for one in measured_lines(panel, beside)
            for line in textwrap.wrap(one, width, subsequent_indent="  ")
        )


def refusals(panel: Panel) -> Iterator[str]:
    """Each reason once, with the ways that it stops."""
    found: dict[str, dict[str, None]] = {}
    for cell in panel.cells:
        if cell.refused:
            found.setdefault(cell.refused, {})[f"{cell.way.method} {cell.way.attention}"] = None
    for reason, ways in found.items():
        yield f"{', '.join(ways)}: {reason}"


def columns(panel: Panel) -> list[str]:
    return list(dict.fromkeys(cell.way.layout for cell in panel.cells))


def label(way: Way) -> str:
    checkpoints = "ckpt" if way.checkpointing == "full" else "-"
    return f"{way.method:<6}{checkpoints:<6}{KERNELS.get(way.attention, way.attention)}"


def rows(panel: Panel) -> dict[str, dict[str, Cell]]:
    found: dict[str, dict[str, Cell]] = {}
    for cell in panel.cells:
        found.setdefault(label(cell.way), {})[cell.way.layout] = cell
    return found


def body(panel: Panel, layouts: list[str], said: Any) -> Iterator[tuple[str, str]]:
    for row, cells in rows(panel).items():
        yield (
            row,
            "".join(
                f"{said(cells[name]) if name in cells else '':>{COLUMN}}" for name in layouts
            ).rstrip(),
        )


def size(cell: Cell) -> str:
    if cell.refused:
        return "- "
    return gib(cell.device) + {"no": "!", "tight": "~"}.get(cell.verdict, " ")


def quickest(panel: Panel) -> list[Cell]:
    """The quickest cell that fits, of each method."""
    best: dict[str, Cell] = {}
    for cell in panel.cells:
        if cell.fits and cell.seconds:
            first = best.setdefault(cell.way.method, cell)
            if cell.seconds < (first.seconds or 0.0):
                best[cell.way.method] = cell
    return list(best.values())


def seconds(cell: Cell, quick: bool) -> str:
    if cell.refused or cell.verdict == "no":
        return "- "
    return "? " if cell.seconds is None else f"{cell.seconds:.3g}" + ("*" if quick else " ")


def measured_lines(panel: Panel, beside: Sequence[tuple[Way, Beside]]) -> Iterator[str]:
    cells = {cell.way: cell for cell in panel.cells}
    yield "measured and predicted:"
    for way, one in beside:
        predicted = one.of(cells[way])
        far = f", {predicted / one.value - 1:+.1%}" if predicted else ""
        yield (
            f"  {' '.join(label(way).split())}, {way.layout}: {one.what} {gib(one.value)} "
            f"GiB measured, {gib(predicted)} predicted{far} ({one.source})"
        )


def words(way: Way, usual: str = "sdpa") -> str:
    """`with ZeRO-2 and checkpointing`; the attention where it is another than the `usual` one."""
    alone, recomputed = way.layout == "one GPU", way.checkpointing == "full"
    layout = "on one GPU" if alone else f"with {way.layout}"
    joined = " with" if alone else " and"
    checkpoints = f"{joined} checkpointing" if recomputed else ", no checkpointing"
    attention = "" if way.attention == usual else f", {way.attention} attention"
    return f"{layout}{checkpoints}{attention}"


def default_words(one: Default, matrix: Matrix) -> str:
    if one.way is None:
        return "does not fit"
    slower = (
        "its time is not known"
        if one.slower is None
        else "the fastest"
        if one.slower < 0.005
        else f"{one.slower:.0%} slower than the fastest"
    )
    kernels = "/".join(name for name in matrix.attention if name != "eager")
    way = words(one.way, "fused" if kernels == "sdpa" else "").replace(" fused ", f" {kernels} ")
    where = "" if one.fits == one.cases else f"in {one.fits} of {one.cases} cases "
    return f"fits {where}{way}: {slower}, {one.memory:.0%} of the GPU"


def markdown(found: Study, beside: Measured) -> str:
    lines: list[str] = []
    for panel in found.panels:
        layouts, quick = columns(panel), quickest(panel)
        both = [
            (
                row,
                *(
                    f"{size(cells[name]).strip()} / "
                    f"{seconds(cells[name], cells[name] in quick).strip()}"
                    if name in cells
                    else ""
                    for name in layouts
                ),
            )
            for row, cells in rows(panel).items()
        ]
        lines += [
            f"**{title(panel)}** (GiB / seconds per step)",
            "",
            *marked.table(("", *layouts), both),
            "",
        ]
        lines += [
            f"- {one.strip()}"
            for one in list(measured_lines(panel, beside.get(key(panel), ())))[1:]
        ]
    lines += ["", LEGEND, ""]
    told = [
        (one.situation, one.method, str(one.cases), default_words(one, found.matrix))
        for one in found.defaults
        if one.method
    ]
    return "\n".join([*lines, *marked.table(("situation", "method", "cases", "begin with"), told)])


def data(found: Study, beside: Measured) -> dict[str, Any]:
    return {
        "schema": 1,
        "whole": found.whole,
        "panels": [
            {
                "model": panel.model,
                "parameters": panel.parameters,
                "gpu": panel.cluster.gpu.id,
                "gpus": panel.cluster.gpus,
                "seq": panel.seq,
                "batch": panel.batch,
                "usable": panel.usable,
                "cells": [cell_data(cell) for cell in panel.cells],
                "measured": [
                    {
                        **way_data(way),
                        "metric": one.metric,
                        "value": one.value,
                        "source": one.source,
                        "id": one.id,
                    }
                    for way, one in beside.get(key(panel), ())
                ],
            }
            for panel in found.panels
        ],
        "defaults": [
            {
                "situation": one.situation,
                "method": one.method,
                "cases": one.cases,
                "fits": one.fits,
                "slower": one.slower,
                "memory": one.memory,
                "way": None if one.way is None else way_data(one.way),
            }
            for one in found.defaults
        ],
    }


def way_data(way: Way) -> dict[str, str]:
    return {
        "method": way.method,
        "checkpointing": way.checkpointing,
        "attention": way.attention,
        "layout": way.layout,
    }


def cell_data(cell: Cell) -> dict[str, Any]:
    if cell.refused:
        return {**way_data(cell.way), "refused": cell.refused}
    band = None if cell.band is None else {"low": cell.band.low, "high": cell.band.high}
    return {
        **way_data(cell.way),
        "verdict": cell.verdict,
        "device": cell.device,
        "reserved": cell.reserved,
        "allocated": cell.allocated,
        "host": cell.host,
        "band": band,
        "seconds": cell.seconds,
    }
