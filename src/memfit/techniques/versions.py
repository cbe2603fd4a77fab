"""Versions of transformers whose code for a family is not what the formulas say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from memfit.constants import counted
from memfit.errors import Problem
from memfit.program import Program
from memfit.techniques.base import TRACE, Technique

READ: Annotated[
    Mapping[str, tuple[int, int]],
    counted(
        "the first version of transformers whose code memfit knows, by family",
        "modeling files of transformers 4.40 and 4.45: before, some had eager attention alone, and "
        "the formulas were 30 % under to 22 % over the real code",
    ),
] = {"falcon": (4, 45), "gpt_neox": (4, 45), "persimmon": (4, 45)}


def check(program: Program) -> Iterator[Problem]:
    since = READ.get(program.model.family)
    if since is not None and program.job.version("transformers") < since:
        message = (
            f"not supported yet: {program.model.family} before transformers {since[0]}.{since[1]}"
        )
        yield Problem(
            message=message,
            where="job.versions",
            hint=f"{TRACE}, with `--python` of an environment with that version",
        )


TECHNIQUE = Technique(
    name="versions",
    order=230,
    cite="transformers 4.40.2 under a trace of its own code",
    wanted=lambda job: job.hugging,
    apply=lambda program: program,
    check=check,
)
