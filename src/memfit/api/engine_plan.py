"""`plan` for a serving engine: from words to a load, and the configurations that hold it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memfit import spellings
from memfit.api.engine import COMMON, read_words, subject_for
from memfit.errors import Problem, raise_errors
from memfit.registry import nearest
from memfit.units import parse_seconds
from memfit.words.gpus import cluster_of
from memfit.words.read import gather

if TYPE_CHECKING:
    from memfit.hardware import Cluster
    from memfit.plan.engine_goals import EnginePlan, Load
    from memfit.serving.planned import PlannedEngine

# What a plan for an engine is asked, beside the engine's own options: name, help.
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
OF_A_PLAN = tuple(name for name in ASKED if name not in COMMON)
CHEAPEST = "cheapest"
MOST = 10**8  # users, tokens
DIGITS = re.compile(r"[0-9]{1,12}")
MOST_GPUS = 8  # of the machines that `cheapest` tries


def plan_from_words(
    words: Sequence[str], command: Sequence[str], engine: str, asked: Mapping[str, Any]
) -> EnginePlan:
    """The plan for flags as they are typed: `words` hold the model and the engine's own flags, or
    `command` is the engine's own command line."""
    from memfit.serving import find_engine

    known = find_engine(engine)
    problems: list[Problem] = []
    model, fixed = read_words(known, words, command, problems)
    return solved(engine, model, fixed, asked, problems)


def plan_engine(model: Any, /, *, engine: str, **given: Any) -> EnginePlan:
    """The configurations of `engine` that hold a load: `gpu` (or `cheapest`), `users`, `in`, `out`,
    `ttft`, `tpot`, `top`; everything else is the engine's own option, and fixed."""
    from memfit.serving import find_engine
    from memfit.serving.flags import read_values

    known = find_engine(engine)
    problems: list[Problem] = []
    ours = {
        *COMMON,
        "gpus",
        "offline",
        *(one.replace("-", "_") for one in spellings.names(OF_A_PLAN)),
    }
    asked = {name: given.pop(name) for name in list(given) if name in ours}
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
    from memfit.serving.speech import is_speech
    from memfit.serving.text_encoders import is_encoder

    known = find_engine(engine)
    planned = find_planned(engine, known)
    typed, asked = asked, spellings.plain(asked, ASKED, problems)
    load = load_of(asked, problems)
    problems += task_problems(str(asked.get("task") or "inference"), str(typed.get("task")))
    market = str(asked.get("gpu") or "").strip().lower() == CHEAPEST
    cluster = cluster_for(asked, market, problems)
    offline = bool(asked.get("offline"))
    subject = (
        gather(problems, lambda: None, lambda: subject_for(known, model, offline))
        if model
        else None
    )
    if subject is not None and (is_encoder(subject.model) or is_speech(subject.model)):
        hint = f"`memfit estimate {shlex.quote(subject.name)} --engine {known.name}` answers"
        message = "plans for the inference of models with an encoder are not supported yet"
        problems.append(Problem(message=message, where="model", hint=hint))
    top = whole(asked, "top", problems) or 5
    problems += fixed_problems(planned, fixed, load)
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


def task_problems(task: str, typed: str) -> Iterator[Problem]:
    if task != "inference":
        close = nearest(task, ("inference",), 1)
        hint = "did you mean `inference`?" if close else "remove it, or remove `engine`"
        yield Problem(message=f"serving engines do not `{typed[:20]}`", where="task", hint=hint)


def cluster_for(asked: Mapping[str, Any], market: bool, problems: list[Problem]) -> Cluster | None:
    """The GPUs that the words name, or None where every machine is tried."""
    gpu, memory = str(asked.get("gpu") or ""), str(asked.get("memory") or "")
    nothing: Cluster | None = None
    if market and memory:
        problems.append(
            Problem(message=f"`{CHEAPEST}` has its own memory", where="memory", hint="remove it")
        )
    elif not market and (gpu or memory):
        return gather(problems, lambda: nothing, lambda: cluster_of(gpu, memory))
    elif not market:
        hint = f"`--gpu NAME`, `--gpu {CHEAPEST}` or `--memory 24GiB`"
        problems.append(Problem(message="no GPU is named", where="gpu", hint=hint))
    return None


def fixed_problems(
    planned: PlannedEngine, fixed: Mapping[str, Any], load: Load
) -> Iterator[Problem]:
    """Fixed options that contradict the load, or that a plan does not know yet."""
    length, needed = int(fixed.get(planned.length) or 0), load.length
    if length < 0:
        yield Problem(
            message=f"a plan sets `{planned.length}` to the load's {needed:,} tokens, so `auto` "
            "has no use",
            where=planned.length,
            hint="omit it",
        )
    elif 0 < length < needed:
        yield Problem(
            message=f"a request of {needed:,} tokens is longer than `{planned.length} {length}`",
            where=planned.length,
            hint=f"leave it out, or set at least {needed}",
        )
    for name in planned.layouts:
        if int(fixed.get(name) or 1) > 1:
            yield Problem(
                message=f"`{name}` in a plan is not supported yet",
                where=name,
                hint=f"leave it out; a plan sets `{planned.tensor}` and the number of copies",
            )


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
    given = asked.get(name)
    if given is None or given == "":
        return 0
    whole_float = isinstance(given, float) and given.is_integer()
    text = str(int(given) if whole_float else given).replace(",", "")
    value = int(text) if DIGITS.fullmatch(text) else 0
    if not 1 <= value <= MOST:
        problems.append(
            Problem(
                message=f"`{name} {str(given)[:40]}` must be an integer from 1 to {MOST:,}",
                where=name,
                hint="like `64`" if name in ("users", "top") else "like `4096` or `8k`",
            )
        )
        return 0
    return value


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


__all__ = ["ASKED", "OF_A_PLAN", "plan_engine", "plan_from_words"]
