"""`plan` for a serving engine: from words to a load, and the configurations that hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memfit.errors import Problem, raise_errors
from memfit.registry import nearest
from memfit.units import parse_seconds
from memfit.verb_engine import subject_for
from memfit.words import cluster_of, gather

if TYPE_CHECKING:
    from memfit.plan.engine_goals import EnginePlan, Load

# What a plan for an engine is asked, beside the engine's own options: name, help. The second
# spellings are those of plans without an engine.
ASKED = {
    "gpu": "GPU or machine: rtx-4090, 8xh100-sxm, or cheapest",
    "memory": "memory of an unlisted GPU, like `24GiB`, or instead of the listed figure",
    "users": "concurrent requests on all GPUs",
    "in": "tokens of a prompt, like `8k`",
    "out": "tokens of an answer, like `1k`",
    "ttft": "maximum time to first token, like `500ms`",
    "tpot": "maximum time per output token, like `30ms`",
    "top": "number of configurations to show [default: 5]",
    "engine_version": "version of the engine, like `0.11.0` [default: the newest]",
    "task": "inference, which is all that engines do",
}
SPELLED = {
    "gpus": "gpu",
    "requests": "users",
    "seq": "in",
    "new_tokens": "out",
    "max_first": "ttft",
    "max_token": "tpot",
}
CHEAPEST = "cheapest"
MOST_GPUS = 8  # of the machines that `cheapest` tries


def plan_from_words(words: Sequence[str], engine: str, asked: Mapping[str, Any]) -> EnginePlan:
    """The plan for flags as they are typed: `words` hold the model and the engine's own flags."""
    from memfit.serving import find_engine
    from memfit.serving.flags import read_flags

    known = find_engine(engine)
    problems: list[Problem] = []
    rest, fixed = read_flags(known.options, words, problems, known.title)
    if len(rest) != 1:
        message = "no model is named" if not rest else f"one model at a time, not {len(rest)}"
        hint = "a hub id, a path, or a name from `memfit models`"
        problems.append(Problem(message=message, where="model", hint=hint))
    return solved(engine, rest[0] if rest else "", fixed, asked, problems)


def plan_engine(model: Any, /, *, engine: str, **given: Any) -> EnginePlan:
    """The configurations of `engine` that hold a load: `gpu` (or `cheapest`), `users`, `in`, `out`,
    `ttft`, `tpot`, `top`; everything else is the engine's own option, and fixed."""
    from memfit.serving import find_engine
    from memfit.serving.flags import read_values

    known = find_engine(engine)
    problems: list[Problem] = []
    names = (*ASKED, *SPELLED, "offline")
    asked = {
        SPELLED.get(name, name): given.pop(name) for name in names if given.get(name) is not None
    }
    fixed = read_values(known.options, given, problems, known.title)
    return solved(engine, model, fixed, asked, problems)


def solved(
    engine: str,
    model: Any,
    fixed: Mapping[str, Any],
    asked: Mapping[str, Any],
    problems: list[Problem],
) -> EnginePlan:
    from memfit.plan.engine_goals import EngineQuestion
    from memfit.plan.engine_search import cheapest_engine, plan_engine
    from memfit.serving import find_engine
    from memfit.serving.planned import find_planned

    known = find_engine(engine)
    planned = find_planned(engine, known)
    load = load_of(asked, problems)
    task = str(asked.get("task") or "inference")
    if task != "inference":
        close = nearest(task, ("inference",), 1)
        hint = "did you mean `inference`?" if close else "remove it"
        problems.append(
            Problem(message=f"an engine does no `{task[:20]}`", where="task", hint=hint)
        )
    gpu = str(asked.get("gpu") or "")
    if not gpu:
        problems.append(
            Problem(message="no GPU is named", where="gpu", hint=f"`--gpu NAME` or `{CHEAPEST}`")
        )
    market = gpu.strip().lower() == CHEAPEST
    cluster = None
    if gpu and not market:
        cluster = gather(
            problems, lambda: None, lambda: cluster_of(gpu, str(asked.get("memory") or ""))
        )
    offline = bool(asked.get("offline"))
    subject = (
        gather(problems, lambda: None, lambda: subject_for(known, model, offline))
        if model
        else None
    )
    top = whole(asked, "top", problems) or 5
    tensor = int(fixed.get(planned.tensor) or 1)
    if cluster is not None and cluster.gpus_per_node % tensor:
        message = f"{tensor} GPUs for each layer do not divide {cluster.gpus_per_node} of a node"
        problems.append(
            Problem(message=message, where=planned.tensor, hint=f"like `--gpus {tensor}xNAME`")
        )
    raise_errors(problems)
    assert subject is not None
    question = EngineQuestion(
        planned=planned,
        subject=subject,
        load=load,
        fixed=fixed,
        version=str(asked.get("engine_version") or ""),
        top=top,
    )
    if market:
        return cheapest_engine(question, MOST_GPUS)
    assert cluster is not None
    return plan_engine(question, cluster)


def load_of(asked: Mapping[str, Any], problems: list[Problem]) -> Load:
    """Users, tokens and limits of time, as they are written."""
    from memfit.plan.engine_goals import Load

    prompt, output = whole(asked, "in", problems), whole(asked, "out", problems)
    if bool(prompt) != bool(output):
        missing = "out" if prompt else "in"
        problems.append(
            Problem(
                message=f"`{missing}` is missing", where=missing, hint="like `--in 8k --out 1k`"
            )
        )
    first, token = limit(asked, "ttft", problems), limit(asked, "tpot", problems)
    if (first or token) and not (prompt and output):
        problems.append(
            Problem(
                message="limits of time need the tokens of a request",
                where="ttft" if first else "tpot",
                hint="like `--in 8k --out 1k`",
            )
        )
    return Load(
        users=whole(asked, "users", problems),
        prompt=prompt,
        output=output,
        first=first,
        token=token,
    )


def whole(asked: Mapping[str, Any], name: str, problems: list[Problem]) -> int:
    """A count from 1 on; 0 where it is not given."""
    text = asked.get(name)
    if text is None or text == "":
        return 0
    plain = str(text).strip().lower().replace(",", "").replace("_", "")
    try:
        value = float(plain[:-1]) * 1024 if plain.endswith("k") else float(plain)
    except ValueError:
        value = 0.0
    if not value >= 1 or value != int(value) or value > 10**8:
        problems.append(
            Problem(
                message=f"`{name} {str(text)[:40]}` must be an integer, at least 1",
                where=name,
                hint="like `64` or `8k`",
            )
        )
        return 0
    return int(value)


def limit(asked: Mapping[str, Any], name: str, problems: list[Problem]) -> float:
    text = str(asked.get(name) or "")
    if not text:
        return 0.0
    value = gather(problems, lambda: 1.0, lambda: parse_seconds(text, name))
    if value <= 0:
        problems.append(
            Problem(message=f"`{name} {text[:40]}` must be more than 0 seconds", where=name)
        )
    return value


__all__ = ["ASKED", "SPELLED", "plan_engine", "plan_from_words"]
