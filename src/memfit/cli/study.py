"""`memfit study`: the ways to fine-tune some models on some machines, and what to begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from memfit.api.study import AXES, VARIED
from memfit.api.verbs import study
from memfit.cli.errors import note_gpu
from memfit.cli.progress import Life
from memfit.errors import InputError
from memfit.output_files import unwritable, write_text
from memfit.terminal import terminal_columns

HELP = """\
{help}.

Covers full fine-tuning, LoRA and QLoRA, with and without gradient checkpointing, eager and fused
attention, DDP and ZeRO-1 to -3, with and without offload. Ctrl-C stops and shows what is done.

Exit code: 0 something fits, 1 nothing fits, 2 unusable input.
"""
LEFT = (
    *AXES,
    *VARIED,
    "new_tokens",
    "cache",
    "cache_tokens",
    "cache_bits",
    "logits",
    "beams",
    "target_seq",
    "images",
    "image_size",
)
FLAGS = (
    click.Option(["--heatmap"], default="", metavar="FILE.svg", help="draw heat maps to this file"),
    click.Option(
        ["--records"],
        default="",
        metavar="DIR",
        help="also show the records of `memfit measure` in this folder",
    ),
)


def run(
    words: tuple[str, ...], heatmap: str, records: str, as_json: bool, form: str, **given: Any
) -> tuple[int, str]:
    from memfit.api.study import recorded
    from memfit.report import study as report
    from memfit.truth.published_cells import beside, published
    from memfit.words.read import gather

    strange = [*unwritable(heatmap, "heatmap")]
    own = gather(strange, list[Any], lambda: recorded(Path(records)) if records else [])
    if strange:
        raise InputError(*strange)
    asked = {name: value for name, value in given.items() if value not in (None, ())}
    note_gpu(str(asked.get("gpu") or ""))
    life = Life()
    try:
        found = study(
            words,
            progress=lambda done, total, what: life.progress(done / max(1, total), "studying"),
            **asked,
        )
    finally:
        life.done()
    measured = published(found) if asked.get("measured", True) else {}
    for place, some in beside(found, own).items():
        measured.setdefault(place, []).extend(some)
    if heatmap:
        from memfit.report.heatmap import svg

        write_text(heatmap, svg(found), "heatmap")
    if as_json or form == "json":
        answer = json.dumps(report.data(found, measured), indent=2, ensure_ascii=False)
    elif form == "markdown":
        answer = report.markdown(found, measured)
    else:
        answer = report.text(found, measured, width=max(80, min(120, terminal_columns())))
    if not found.whole:
        return 130, answer
    return (0 if any(cell.fits for panel in found.panels for cell in panel.cells) else 1), answer


__all__ = ["FLAGS", "HELP", "LEFT", "run"]
