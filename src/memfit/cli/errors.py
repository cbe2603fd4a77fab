"""Errors as people and as programs read them: lines on stderr, and one form in JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from memfit.errors import Problem
from memfit.terminal import coloured, escaped, say

FORMATS = ("--json", "--format=json")


def complain(problems: Sequence[Problem]) -> None:
    if not problems:
        return  # most answers have none, and need not load how they are shown
    from memfit.report.text import paint, remarks

    colour = coloured(sys.stderr)
    for line in remarks(problems):
        one = escaped(line, keep="\t")
        say(paint(one) if colour else one)


def note_gpu(gpu: str) -> None:
    """Say on stderr which GPU is meant where the words name several, or a machine."""
    from memfit.words.gpus import gpu_notes

    complain(gpu_notes(gpu))


def wants_json(words: Sequence[str]) -> bool:
    """Whether the words of a command line ask for JSON; behind a script they are the script's."""
    from memfit.words.models import is_program

    for place, word in enumerate(words):
        if word == "--" or (words[0] == "trace" and is_program(word)):
            return False
        if word in FORMATS or (word == "--format" and words[place + 1 : place + 2] == ["json"]):
            return True
    return False


def envelope(command: str, problems: Iterable[Problem]) -> str:
    """An error as JSON: a schema number and `problems`; `estimate` and `trace` keep all keys of
    their answers."""
    from memfit.report.codec import SCHEMA, problem_dict, refusal

    found: dict[str, Any] = (
        refusal(problems)
        if command in ("estimate", "trace")
        else {"schema": SCHEMA, "problems": [problem_dict(one) for one in problems]}
    )
    return json.dumps(found, indent=2, ensure_ascii=False)


__all__ = ["complain", "envelope", "note_gpu", "wants_json"]
