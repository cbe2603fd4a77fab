"""`estimate` for a serving engine: from words to a `Question`, and the engine's answer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError, Problem
from memfit.serving import SERVER_ENGINE
from memfit.words.gpus import cluster_of
from memfit.words.read import gather

if TYPE_CHECKING:
    from memfit.hardware import Cluster
    from memfit.serving.base import Device, Option, Question, ServingEngine, Subject
    from memfit.serving.result import ServingAnswer

# What every engine is asked, beside its own options: name, help.
COMMON = {
    "gpu": "the GPU, or several of one kind like `2xh100-sxm`; see `memfit gpus`",
    "memory": "memory of an unlisted GPU, like `24GiB`, or instead of the listed figure",
    "engine_version": "its version, like `0.11.0` [default: the newest that memfit knows]",
}


def serve(
    model: str | os.PathLike[str] | Mapping[str, Any] = "",
    /,
    *,
    engine: str = SERVER_ENGINE,
    **given: Any,
) -> ServingAnswer:
    """What `engine` will say at its start: memory by purpose, tokens of cache, or the error that it
    raises. `gpu`, `memory`, `offline` and `engine_version` are common to all engines; everything
    else is the engine's own option. All problems are raised at once."""
    from memfit.serving import find_engine
    from memfit.serving.flags import read_values

    known = find_engine(engine)
    problems: list[Problem] = []
    if "gpus" in given and "gpu" not in given:
        given["gpu"] = given.pop("gpus")
    common = {name: given.pop(name) for name in (*COMMON, "offline") if name in given}
    values = read_values(known.options, given, problems, known.title)
    return answered(known, question(known, model, common, values, problems), problems, spread=True)


def of_an_engine(name: str) -> Problem | None:
    """What to say where a question about transformers and PEFT has an engine's option."""
    from memfit.serving import ENGINES, find_engine

    owners = [
        one
        for one in ENGINES
        if name in ("engine", "engine_version")
        or any(option.name == name for option in find_engine(one).options)
    ]
    if not owners:
        return None
    engine = "vllm" if "vllm" in owners else owners[0]
    hint = f"`memfit.serve(model, engine={engine!r})` answers for serving engines"
    return Problem(message=f"unknown option `{name[:60]}`", where=name[:60], hint=hint)


def from_command(
    words: Sequence[str], command: Sequence[str], engine: str, common: Mapping[str, Any]
) -> ServingAnswer:
    """The answer for flags as they are typed: `words` of memfit's own command line, and the
    engine's own command line where one is given (`-- vllm serve …`)."""
    from memfit.serving import find_engine

    known = find_engine(engine)
    problems: list[Problem] = []
    model, values = read_words(known, words, command, problems)
    asked = question(known, model, common, values, problems)
    return answered(known, asked, problems, spread=not command)


def read_words(
    engine: ServingEngine, words: Sequence[str], command: Sequence[str], problems: list[Problem]
) -> tuple[str, dict[str, Any]]:
    """The model and the engine's options in memfit's own words and in the engine's command line;
    the former win."""
    from memfit.serving.flags import read_flags

    rest, values = read_flags(engine.options, words, problems, engine.title, shared=True)
    if command:
        named, flags = engine.read(command)
        more, inner = read_flags(engine.options, flags, problems, engine.title)
        rest += dict.fromkeys(one for one in (named, *more) if one)
        values = {**inner, **values}
    if len(rest) != 1:
        listed = ", ".join(f"`{one[:40]}`" for one in rest[:4])
        problems.append(
            Problem(
                message=f"one model at a time, not {len(rest)}: {listed}"
                if rest
                else "no model is named",
                where="model",
                hint="a hub id, a path, or a name from `memfit models`",
            )
        )
    return (rest[0] if rest else ""), values


def answered(
    engine: ServingEngine, asked: Question | None, problems: list[Problem], *, spread: bool = False
) -> ServingAnswer:
    """The engine's answer, with a setting that works where it does not start; its own problems join
    those found before. `spread`: on all GPUs, where no option says how they share the work."""
    from memfit.serving.all_gpus import on_all_gpus
    from memfit.serving.remedies import with_remedy

    try:
        if asked is not None:
            first = on_all_gpus(engine, asked) if spread else (asked, engine.answer(asked))
            answer = with_remedy(engine, *first)
            if not problems:
                return answer
    except InputError as bad:
        problems += bad.problems
    raise InputError(*problems)


def question(
    engine: ServingEngine,
    model: Any,
    common: Mapping[str, Any],
    values: Mapping[str, Any],
    problems: list[Problem],
) -> Question | None:
    """Read the options of a serving engine. The problems found join `problems`."""
    from memfit.serving.base import Question
    from memfit.serving.separate_drafts import draft_name, draft_option

    nothing: Cluster | None = None
    cluster = gather(
        problems,
        lambda: nothing,
        lambda: cluster_of(str(common.get("gpu") or ""), str(common.get("memory") or "")),
    )
    missing: Subject | None = None
    offline = bool(common.get("offline"))
    subject = (
        gather(problems, lambda: missing, lambda: subject_for(engine, model, offline))
        if model
        else None
    )
    if not model and not problems:
        problems.append(Problem(message="no model is named", where="model"))
    if subject is None:
        return None
    name = draft_name(values)
    draft = another(engine, name, draft_option(values), offline, problems) if name else None
    others = [another(engine, one, "--beside", offline, problems) for one in beside(values)]
    return Question(
        subject=subject,
        draft=draft,
        beside=tuple(one for one in others if one is not None),
        draft_left_out=bool(name) and draft is None,
        devices=() if cluster is None else (device_of(cluster),) * cluster.gpus,
        options=values,
        version=str(common.get("engine_version") or ""),
    )


def beside(values: Mapping[str, Any]) -> list[str]:
    """Names of the models that stay loaded on the same GPU."""
    return [one for one in str(values.get("beside") or "").split(",") if one]


def device_of(cluster: Cluster) -> Device:
    from memfit.serving.base import Device

    gpu = cluster.gpu
    return Device(name=gpu.name, total=gpu.memory, free=gpu.free, gpu=gpu)


def subject_for(engine: ServingEngine, model: Any, offline: bool) -> Subject:
    """The model as this engine reads it."""
    own = None if isinstance(model, Mapping) else engine.subject(str(model), offline)
    return own or subject_of(model, offline)


def another(
    engine: ServingEngine, name: str, option: str, offline: bool, problems: list[Problem]
) -> Subject | None:
    """Another model that this option names; why there is none joins `problems`."""
    try:
        return subject_for(engine, name, offline)
    except InputError as bad:
        problems += [replace(one, where=option) for one in bad.problems]
        return None


def subject_of(model: Any, offline: bool = False) -> Subject:
    """The model to serve, with its structure where memfit has formulas for the family. Weights are
    built at the model's own dtype: what a quantization stores is the engine's business."""
    from memfit.model.source import read
    from memfit.serving.subject import of_config, subject_from

    if isinstance(model, Mapping):
        return of_config(model, str(model.get("model_type", "model")))
    return subject_from(read(model, offline=offline))


def help_lines(engine: ServingEngine) -> list[tuple[str, str]]:
    """Every option of an engine with its help."""
    shown = (one for one in engine.options if one.supported and not one.silent)
    return [(spelled(one), explained(one)) for one in shown]


def spelled(option: Option) -> str:
    metavar = {"flag": "", "text": " TEXT", "float": " X", "json": " JSON"}.get(option.kind, " N")
    return ", ".join(option.flags) + metavar


def explained(option: Option) -> str:
    choices = f": {', '.join(option.choices)}" if option.choices else ""
    return option.help + choices + (f" [default: {option.default}]" if option.default else "")


__all__ = ["COMMON", "from_command", "help_lines", "question", "serve", "subject_of"]
