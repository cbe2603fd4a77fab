"""What goes into a model, and which head it has: formulas know text, and heads of words and of
labels."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.model.classes import wordless_class
from memfit.model.heads import LABELLED, label_heads_of
from memfit.program import Program
from memfit.techniques.base import TRACE, Technique

LAYOUTS = ("ddp", "fsdp", "zero")  # that look at no head


def check(program: Program) -> Iterator[Problem]:
    job = program.job
    if job.labels and head_of(program) not in LABELLED:
        message = f"a head of kind `{head_of(program)}` has no labels to count"
        hint = "use `--head classification`, or remove `--labels`"
        yield Problem(message=message, where="job.labels", hint=hint)
    if program.model.encodes:
        return  # its graphs say which heads they have
    yield from of_labels(program)
    if job.images:
        yield Problem(message="not supported yet: images", where="job.images", hint=TRACE)
    if job.target_seq:
        message = f"the family `{program.model.family}` is not an encoder-decoder model"
        yield Problem(message=message, where="job.target_seq", hint="remove `target_seq`")
    if job.head not in ("auto", *program.model.heads):
        yield Problem(
            message=f"not supported yet: a head of kind `{job.head}`", where="job.head", hint=TRACE
        )


def of_labels(program: Program) -> Iterator[Problem]:
    """What a decoder with a head of labels is not run with, and a class with another head than
    there are formulas for."""
    job, model = program.job, program.model
    unknown = wordless_class(model.config)
    if model.labelled is None and unknown and job.head == "auto":
        message = f"not supported yet: the class `{unknown[:60]}`"
        hint = "choose a class with `--head`: " + ", ".join(
            f"`{one}`" for one in (*model.heads, *label_heads_of(model.config))
        )
        yield Problem(message=message, where="config.architectures", hint=hint)
    if model.labelled is None:
        return
    task = model.labelled.task
    if job.framework != "transformers":
        message = f"`--framework {job.framework}` does not train a head of kind `{task}`"
        hint = "use `--framework transformers`"
        yield Problem(message=message, where="job.framework", hint=hint)
    if job.loss != "plain":
        message = f"a head of kind `{task}` has its own loss"
        yield Problem(message=message, where="job.loss", hint="remove `--loss`")
    if job.unsloth:
        message = f"not supported yet: Unsloth with a head of kind `{task}`"
        yield Problem(message=message, where="job.unsloth", hint=TRACE)
    for name, layout in program.strategy.uses():
        if layout.size > 1 and name not in LAYOUTS:
            message = f"not supported yet: `{name}` with a head of kind `{task}`"
            yield Problem(message=message, where=f"use {name}", hint=TRACE)


def head_of(program: Program) -> str:
    """The head that runs."""
    graphs, head = program.model.graphs, program.job.head
    if program.model.encodes:
        known: str = graphs.head
        return known
    if program.model.labelled is not None:
        return program.model.labelled.task
    return "causal-lm" if head == "auto" else head


TECHNIQUE = Technique(
    name="inputs",
    order=10,
    cite="transformers 5.23 models/auto",
    wanted=lambda job: True,
    apply=lambda program: program,
    check=check,
)
