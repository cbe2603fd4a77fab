"""Where a question names several GPUs and no layout, all of them share each layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.errors import InputError, Problem
from memfit.serving.base import Question, ServingEngine
from memfit.serving.result import ServingAnswer

LAYOUTS = ("tensor", "stages", "copies")  # of `Option.means`


def on_all_gpus(engine: ServingEngine, question: Question) -> tuple[Question, ServingAnswer]:
    """The question as it is answered, and the engine's answer. Most engines use one GPU unless they
    are told otherwise, but nobody names GPUs that are to stand idle; so all of them share the
    layers, or as many as the model allows, and the answer says so."""
    asked = {one.means for one in engine.options if one.name in question.options}
    option = next((one for one in engine.options if one.means == "tensor"), None)
    if option is None or not engine.shared_flag or asked.intersection(LAYOUTS):
        return question, engine.answer(question)
    for count in counts(len(question.devices)):
        wider = replace(question, options={**question.options, option.name: count})
        try:
            answer = engine.answer(wider)
        except InputError:  # heads that cannot be shared so, for one
            continue
        note = assumed(engine, question, count)
        return wider, replace(answer, problems=(*answer.problems, note))
    return question, engine.answer(question)


def counts(given: int) -> Iterator[int]:
    """All GPUs, then fewer: powers of two, which divide most models' heads."""
    if given > 1:
        yield given
    for power in range(given.bit_length() - 1, 0, -1):
        if 2**power < given:
            yield 2**power


def assumed(engine: ServingEngine, question: Question, count: int) -> Problem:
    given = len(question.devices)
    gpus = f"{count} of {given}" if count < given else "both" if given == 2 else f"all {given}"
    return Problem(
        level="note",
        message=(
            f"assumed: {engine.shared_flag} {count}, so {gpus} GPUs share each layer; "
            f"{engine.shared_flag} 1 answers for one GPU"
        ),
        where=engine.shared_flag,
    )


__all__ = ["on_all_gpus"]
