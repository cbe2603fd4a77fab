"""Lists of models and GPUs, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from memfit.hardware import GPU, usable
from memfit.model.catalog import Entry
from memfit.report.figures import count, gib

UNCHECKED = "?"


def columns(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int], room: int = 0
) -> str:
    """As wide as its widest cells; `right` are the columns of numbers. Of a line that is longer
    than `room` (0: any) the end is left out."""
    cells = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    lines = (
        "  ".join(
            f"{cell:>{width}}" if at in right else f"{cell:<{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return "\n".join(
        line if not room or len(line) <= room else line[: room - 1] + "…"
        for line in map(str.rstrip, lines)
    )


def models(entries: Sequence[Entry], room: int = 0) -> str:
    rows = [(entry.name, size(entry), entry.model_type) for entry in entries]
    return columns(("model", "parameters", "type"), rows, frozenset({1}), room)


def size(entry: Entry) -> str:
    known = entry.parameters if entry.parameters is not None else entry.published
    return "" if known is None else count(known)


def models_json(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [
        {
            "name": entry.name,
            "model_type": entry.model_type,
            "parameters": entry.parameters,
            "published": entry.published,
            "config": entry.provenance,
            "source": entry.source,
        }
        for entry in entries
    ]


def gpus(found: Sequence[GPU], room: int = 0) -> str:
    """The table of GPUs; a question mark follows each figure without proof."""
    rows = [
        (
            gpu.id,
            marked(gpu, "memory", gib(usable(gpu))),
            rate(gpu, "bandwidth", gpu.bandwidth, 1e9),
            rate(gpu, "bf16", gpu.rates.get("bf16"), 1e12),
            gpu.name,
        )
        for gpu in found
    ]
    text = columns(
        ("gpu", "usable GiB", "GB/s", "bf16 TFLOP/s", "name"), rows, frozenset({1, 2, 3}), room
    )
    return text + (
        f"\n{UNCHECKED} on record without proof"
        if any(UNCHECKED in cell for row in rows for cell in row[1:4])
        else ""
    )


def rate(gpu: GPU, field: str, value: float | None, unit: float) -> str:
    return "" if value is None else marked(gpu, field, f"{value / unit:.0f}")


def marked(gpu: GPU, field: str, text: str) -> str:
    return text + (UNCHECKED if field in gpu.unchecked else "")


def gpus_json(found: Sequence[GPU]) -> list[dict[str, Any]]:
    return [
        {
            "id": gpu.id,
            "name": gpu.name,
            "vendor": gpu.vendor,
            "usable": usable(gpu),
            "memory_low": gpu.memory_range[0],
            "memory_high": gpu.memory_range[1],
            "bandwidth": gpu.bandwidth,
            "rates": dict(gpu.rates),
            "arch": gpu.arch,
            "status": dict(gpu.status),
            "cites": dict(gpu.cites),
        }
        for gpu in found
    ]
