"""`memfit MODEL --gpu NAME`: no verb. What a GPU can do with a model, or all that a GPU can do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from memfit.cli.errors import note_gpu
from memfit.words.gpus import is_gpu, names_gpu, one_model

if TYPE_CHECKING:
    from memfit.api.card import Question

HELP = """\
{help}.

`memfit MODEL --gpu NAME` is short for it. Without MODEL it lists well-known models for the GPU.
Without a GPU it uses this machine's, or finds the smallest GPU for each use.

The answer is kept on disk (`memfit cache`).

Exit code: 0 something fits, 1 nothing fits, 2 unusable input.
"""


def run(words: tuple[str, ...], as_json: bool, **given: Any) -> tuple[int, str]:
    from memfit import disk_cache
    from memfit.api.card import name_on_disk, question

    values = {name: value for name, value in given.items() if value not in (None, ())}
    named = names_gpu(words) or (len(words) > 2 and is_gpu(words[-1]))
    note_gpu(str(values.get("gpu") or ""))
    asked = question(one_model(words) if named else " ".join(words), values)
    name = "" if disk_cache.folder() is None else name_on_disk(asked)
    found = (name and disk_cache.read(name)) or None
    if found is None:
        found = answered(asked)
        if name:
            disk_cache.write(name, found)
    if as_json:
        return found["code"], json.dumps(found["data"], indent=2, ensure_ascii=False)
    return found["code"], found["text"]


def answered(asked: Question) -> dict[str, Any]:
    """The answer in both forms, and its exit code."""
    from memfit.api.card import answer
    from memfit.cli.progress import Life
    from memfit.plan.card import Card
    from memfit.processes import usual_processes
    from memfit.report import card as report

    life = Life()

    def progress(done: int, total: int, what: str) -> None:
        life.progress(done / total, what)

    try:
        found = answer(asked, progress, usual_processes())
    finally:
        life.done()
    code = 1 if isinstance(found, Card) and found.rows and not found.fits else 0
    return {"code": code, "text": report.text(found), "data": report.data(found)}


__all__ = ["HELP", "run"]
