"""Versions of transformers whose code for a family is not what the formulas say."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.program import Program
from memfit.techniques.base import TRACE, Technique

# Since which version they are: before it some had eager attention alone. Against the real code of
# 4.40 the formulas were −30 to +22 % off.
READ = {"falcon": (4, 45), "gpt_neox": (4, 45), "persimmon": (4, 45)}


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
