"""What goes into a model: so far the formulas know text for a language model's head."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.job import Job
from memfit.model.heads import LABELLED
from memfit.program import Program
from memfit.techniques.base import TRACE, Technique


def wanted(job: Job) -> bool:
    return bool(job.images or job.target_seq or job.labels) or job.head != "auto"


def check(program: Program) -> Iterator[Problem]:
    job = program.job
    if job.labels and head_of(program) not in LABELLED:
        message = f"a head of kind `{head_of(program)}` has no labels to count"
        yield Problem(
            message=message, where="job.labels", hint="use `--head classification`, or remove it"
        )
    if program.model.encodes:
        return  # its graphs say which heads they have
    if job.images:
        yield Problem(message="not supported yet: images", where="job.images", hint=TRACE)
    if job.target_seq:
        message = f"the family `{program.model.family}` is not an encoder-decoder model"
        yield Problem(message=message, where="job.target_seq", hint="remove `target_seq`")
    if job.head not in ("auto", *program.model.heads):
        yield Problem(
            message=f"not supported yet: a head of kind `{job.head}`", where="job.head", hint=TRACE
        )


def head_of(program: Program) -> str:
    """The head that runs."""
    graphs, head = program.model.graphs, program.job.head
    known: str = graphs.head if program.model.encodes else "causal-lm" if head == "auto" else head
    return known


TECHNIQUE = Technique(
    name="inputs",
    order=10,
    cite="transformers 5.23 models/auto",
    wanted=wanted,
    apply=lambda program: program,
    check=check,
)
