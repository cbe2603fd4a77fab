"""A study as text, Markdown and JSON: two tables for every model, machine and length, and what to
begin with."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memfit.plan.study import Cell, Default, Panel, Study, Way
from memfit.report import markdown as marked
from memfit.report.figures import gib
from memfit.truth.published_cells import Beside

LABEL, COLUMN = 20, 10
SHORT = {"ZeRO-2 + offload": "2+offload", "ZeRO-3 + offload": "3+offload"}
KERNELS = {"flash-attn-2": "flash"}
LEGEND = (
    "! does not fit, ~ may fit, * fastest that fits, - not supported. GiB: "
    "device memory of the worst rank; s: time per optimizer step. Rows: "
    "method, gradient checkpointing (ckpt) or none, attention."
)
Measured = Mapping[tuple[str, str, int, int], Sequence[tuple[Way, Beside]]]


def text(found: Study, beside: Measured, *, width: int = 80) -> str:
    blocks = [
        panel for one in found.panels for panel in panel_text(one, beside.get(key(one), ()), width)
    ]
    blocks.append("\n".join(textwrap.wrap(LEGEND, width)))
    if found.defaults:
        blocks.append(
            "\n".join(
                ["recommendations", *map("  ".__add__, default_lines(found.defaults, width - 2))]
            )
        )
    if not found.whole:
        blocks.append("Ctrl-C stopped the study: it has the cells computed so far")
    return "\n\n".join(blocks)


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
    timed = body(panel, layouts, lambda cell: seconds(cell, quick))
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


def quickest(panel: Panel) -> Cell | None:
    return min(
        (cell for cell in panel.cells if cell.fits and cell.seconds),
        key=lambda cell: cell.seconds or 0.0,
        default=None,
    )


def seconds(cell: Cell, quick: Cell | None) -> str:
    if cell.refused or cell.verdict == "no":
        return "- "
    return "? " if cell.seconds is None else f"{cell.seconds:.3g}" + ("*" if cell is quick else " ")


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


def words(way: Way) -> str:
    """`LoRA, ZeRO-2, checkpointing, fused attention`."""
    method = {"lora": "LoRA", "qlora": "QLoRA"}.get(way.method, way.method)
    parts = [
        method,
        way.layout,
        *(["checkpointing"] if way.checkpointing == "full" else []),
        f"{way.attention} attention",
    ]
    return ", ".join(parts)


def default_words(one: Default) -> str:
    if one.way is None:
        return "nothing fits"
    slower = (
        "time unknown"
        if one.slower is None
        else "the quickest"
        if one.slower < 0.005
        else f"{one.slower:.0%} slower than the fastest"
    )
    return (
        f"{words(one.way)}: fits in {one.fits} of {one.cases}, {slower}, {one.memory:.0%} of "
        "the GPU"
    )


def default_lines(found: Sequence[Default], width: int) -> Iterator[str]:
    """Of each method: what they learn differs, and so they are not compared with each other."""
    situation, several = "", len({one.method for one in found}) > 1
    for one in found:
        if several and not one.method:
            continue
        if one.situation != situation:
            situation = one.situation
            yield f"{situation}, {one.cases} case{'' if one.cases == 1 else 's'}"
        yield from textwrap.wrap(
            f"  {one.method or 'any method'}: {default_words(one)}",
            width,
            subsequent_indent="      ",
        )


def markdown(found: Study, beside: Measured) -> str:
    lines: list[str] = []
    for panel in found.panels:
        layouts, quick = columns(panel), quickest(panel)
        both = [
            (
                row,
                *(
                    f"{size(cells[name]).strip()} / {seconds(cells[name], quick).strip()}"
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
        (one.situation, one.method or "any", str(one.cases), default_words(one))
        for one in found.defaults
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
