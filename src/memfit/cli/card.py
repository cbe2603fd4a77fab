"""`memfit MODEL --gpu NAME`: no verb. What a GPU can do with a model, or all that a GPU can do."""

from __future__ import annotations

import json
from typing import Any

from memfit.cli.errors import note_gpu
from memfit.words.gpus import is_gpu, names_gpu, one_model

HELP = """\
{help}.

`memfit MODEL --gpu NAME` is short for it. Without MODEL it lists well-known models for the GPU.
Without a GPU it uses this machine's, or finds the smallest GPU for each use.

Exit code: 0 something fits, 1 nothing fits, 2 unusable input.
"""


def run(words: tuple[str, ...], as_json: bool, **given: Any) -> tuple[int, str]:
    from memfit.api.card import card
    from memfit.cli.trace import Life
    from memfit.plan.card import Card
    from memfit.processes import usual_processes
    from memfit.report import card as report

    values = {name: value for name, value in given.items() if value not in (None, ())}
    named = names_gpu(words) or (len(words) > 2 and is_gpu(words[-1]))
    note_gpu(str(values.get("gpu") or ""))
    life = Life()

    def progress(done: int, total: int, what: str) -> None:
        life.say(f"{what}, {done + 1} of {total}")

    try:
        found = card(
            one_model(words) if named else " ".join(words),
            progress=progress,
            processes=usual_processes(),
            **values,
        )
    finally:
        life.done()
    code = 1 if isinstance(found, Card) and found.rows and not found.fits else 0
    if as_json:
        return code, json.dumps(report.data(found), indent=2, ensure_ascii=False)
    return code, report.text(found)


__all__ = ["HELP", "run"]
