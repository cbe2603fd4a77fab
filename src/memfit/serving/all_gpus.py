"""Where a question names several GPUs and no layout, all of them share each layer."""

from __future__ import annotations

from dataclasses import replace

from memfit.errors import InputError, Problem
from memfit.serving.base import Question, ServingEngine
from memfit.serving.result import ServingAnswer

LAYOUTS = ("tensor", "stages", "copies")  # of `Option.means`


def on_all_gpus(engine: ServingEngine, question: Question) -> tuple[Question, ServingAnswer]:
    """The question as it is answered, and the engine's answer. An engine uses one GPU unless it is
    told otherwise, but nobody names GPUs that are to stand idle; so layers are shared among as many
    of them as the model allows, and the answer says so."""
    asked = {one.means for one in engine.options if one.name in question.options}
    option = next((one for one in engine.options if one.means == "tensor"), None)
    if option is None or not engine.shared_flag or asked.intersection(LAYOUTS):
        return question, engine.answer(question)
    for count in range(len(question.devices), 1, -1):
        wider = replace(question, options={**question.options, option.name: count})
        try:
            answer = engine.answer(wider)
        except InputError:  # heads that cannot be shared so, for one
            continue
        note = assumed(engine, question, count)
        return wider, replace(answer, problems=(*answer.problems, note))
    return question, engine.answer(question)


def assumed(engine: ServingEngine, question: Question, count: int) -> Problem:
    given = len(question.devices)
    gpus = f"{count} of {given}" if count < given else "both" if given == 2 else f"all {given}"
    return Problem(
        level="note",
        message=(
            f"assumed: {engine.shared_flag} {count}, so {gpus} GPUs share each layer; "
            f"{engine.title} itself uses one GPU unless told otherwise"
        ),
        where=engine.shared_flag,
    )


__all__ = ["on_all_gpus"]
