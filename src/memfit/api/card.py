"""`card`: what a GPU can do with a model, which GPU a model needs, and what a GPU can do at all."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit import __version__, disk_cache
from memfit.commands import command
from memfit.defaults import assumed
from memfit.errors import InputError, MissingExtra, Problem, raise_errors
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.strategy import Strategy
from memfit.words.gpus import cluster_of
from memfit.words.models import model_of
from memfit.words.options import Ask
from memfit.words.read import ask_from, gather

if TYPE_CHECKING:
    from memfit.hardware import GPU, Cluster
    from memfit.model.model import Model
    from memfit.plan.card import Card, Progress, Row, Served, Use
    from memfit.plan.shelf import Shelf, Smallest, Smallests

# Models that people ask for most, by families and sizes; all are in the catalog.
WELL_KNOWN = (
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-3B",
    "Qwen/Qwen3-4B",
    "mistralai/Mistral-7B-v0.3",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-8B",
    "google/gemma-3-12b-it",
    "Qwen/Qwen3-14B",
    "openai/gpt-oss-20b",
    "google/gemma-4-26B-A4B-it",
    "Qwen/Qwen3-30B-A3B",
    "google/gemma-4-31B-it",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "openai/gpt-oss-120b",
)
ALL_LAYERS = 999  # as llama.cpp's own documentation writes it
OPTIONS = ("gpu", "memory", "offline")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a card is asked about. `several`: well-known models, or those of a family; else there is
    one model, and `unknown` says why it has no card. Without a `cluster` the smallest GPU is
    sought. `subject` and `place` are words of the command line."""

    subject: str
    models: tuple[Model, ...]
    several: bool = False
    unknown: str = ""
    cluster: Cluster | None
    place: str


def card(
    model: str | os.PathLike[str] | Mapping[str, Any] | Model = "",
    /,
    *,
    progress: Progress | None = None,
    processes: int = 1,
    **given: Any,
) -> Card | Shelf | Smallests:
    """What `gpu` can do with `model`; without a model, with well-known ones; without a GPU, the
    smallest GPU for each use. A name that several models share means all of them. `progress` is
    told how many searches or models are done, of how many, and what comes next. `processes` share
    the work; some systems start them anew, so a program that asks for several has to be
    importable."""
    return answer(question(model, given), progress, processes)


def question(
    model: str | os.PathLike[str] | Mapping[str, Any] | Model, given: Mapping[str, Any]
) -> Question:
    """The models and GPUs that are meant. All problems are raised at once."""
    problems: list[Problem] = []
    values = {name: value for name, value in given.items() if value is not None}
    strange = [name for name in values if name not in OPTIONS]
    problems += [
        Problem(message=f"`{name}` is no option of a card", where=name, hint="`memfit estimate`")
        for name in strange
    ]
    ask = ask_from({name: values[name] for name in OPTIONS if name in values}, problems)
    cluster = gather(problems, lambda: None, lambda: cluster_of(ask.gpu, ask.memory))
    raise_errors(problems)
    cluster = cluster or own_gpu()
    place = " ".join(
        f"--{name} {shlex.quote(str(values[name]))}" for name in ("gpu", "memory") if name in values
    )
    asked = partial(Question, cluster=cluster, place=place or "--gpu auto")
    names = family(model) if isinstance(model, str) else ()
    word = model if isinstance(model, str) else ""
    if len(names) == 1:
        model = names[0]
    elif names or not model:
        if cluster is None:
            raise InputError(without_gpu(word, names))
        return asked(subject=word, models=tuple(with_cards(word, names)), several=True)
    _, found = model_of(model, dataclasses.replace(ask, by="auto"), reasons := list[Problem]())
    subject = os.fspath(model) if isinstance(model, (str, os.PathLike)) else found.name
    why = ""
    if not has_card(found):
        why = reasons[0].message if reasons else f"`{found.family}` has no formulas"
        why = "a card is about models that read and generate text" if found.layers else why
    return asked(subject=subject, models=(found,), unknown=why)


def answer(
    asked: Question, progress: Progress | None = None, processes: int = 1
) -> Card | Shelf | Smallests:
    from memfit.plan import card as cards
    from memfit.plan import shelf as shelves

    asking = cards.Asking(
        job_of=job_of, serve=served, processes=processes, progress=progress or cards.quiet
    )
    cluster, model, subject = asked.cluster, asked.models[0], asked.subject
    if cluster is None:
        if asked.unknown:
            return shelves.Smallests(model=model, rows=(), unknown=asked.unknown, subject=subject)
        known = shelves.smallest(model, asking)
        rows = tuple(smallest_command(one, known, subject) for one in known.rows)
        return dataclasses.replace(known, rows=rows, subject=subject)
    if asked.several:
        return shelves.shelf(asked.models, cluster, asking)
    if asked.unknown:
        return cards.Card(
            model=model,
            cluster=cluster,
            strategies={},
            rows=(),
            unknown=asked.unknown,
            subject=subject,
        )
    return spelled(cards.card(model, cluster, asking), subject, asked.place)


def name_on_disk(asked: Question, code: Path = disk_cache.CODE) -> str:
    """A name for everything that the answer depends on. Formulas read no installed version, and the
    tables of GPUs and prices are files of memfit, beside those of the user."""
    from memfit.hardware import own_gpus
    from memfit.hardware.own import own_prices

    models = [(repr(one), one.config, one.stored, served_from(one)) for one in asked.models]
    return disk_cache.name_of(
        {
            "card": [asked.subject, asked.several, asked.unknown, asked.place],
            "models": models,
            "cluster": None if asked.cluster is None else repr(dataclasses.asdict(asked.cluster)),
            "own": [
                [repr(dataclasses.asdict(gpu)) for gpu in own_gpus().values()],
                list(own_gpus()),
                own_prices(),
            ],
            "code": [__version__, disk_cache.code_fingerprint(code), sys.version],
        }
    )


def served_from(model: Model) -> str:
    """What llama.cpp's rows read by the model's name, which may be another file than its own."""
    from memfit.api.engine import subject_for
    from memfit.serving import find_engine

    try:
        return repr(subject_for(find_engine("llama.cpp"), f"{model.name}:Q8_0", offline=True))
    except InputError as bad:
        return str(bad)


def own_gpu() -> Cluster | None:
    """The GPU of this machine, if it has one and the driver answers."""
    from memfit.hardware import Cluster, auto_gpu

    try:
        return Cluster(gpu=auto_gpu())
    except (InputError, MissingExtra):
        return None


def family(name: str) -> tuple[str, ...]:
    """The models of the catalog that a family's name or a size means."""
    from memfit.model.family_names import models_of

    return () if Path(name).exists() else models_of(name)


def with_cards(word: str, names: Sequence[str]) -> list[Model]:
    """The models of a family, or well-known ones, that have a card."""
    some = [one for name in names or WELL_KNOWN for one in built(name)]
    if some:
        return some
    raise InputError.one(
        f"none of the {len(names)} models that `{word}` could be has a card",
        where="model",
        hint=f"ask for one of them, like `memfit estimate {names[0]}`",
    )


def without_gpu(name: str, names: Sequence[str]) -> Problem:
    """What to say where neither a GPU nor one model is named."""
    if not name:
        hint = "name one like `--gpu rtx-4090`"
        return Problem(message="a GPU is missing", where="gpu", hint=hint)
    from memfit.model.sources.files import listed

    cards = any(built(one) for one in names)
    together = ", or add `--gpu NAME` to see them all on one GPU" if cards else ""
    return Problem(
        message=f"`{name}` could be any of {len(names)} models: {listed(list(names))}",
        where="model",
        hint=f"give one of them{together}",
    )


def has_card(model: Model) -> bool:
    """Whether the formulas know a model of texts; the head of a decoder has to be that of words."""
    hears = model.encodes and model.graphs.row.hears
    return bool(model.layers) and model.labelled is None and not hears


def built(name: str) -> list[Model]:
    """None where it has no card."""
    try:
        model = model_of(name, Ask(offline=True, by="formula"))[1]
    except InputError:
        return []
    return [model] if has_card(model) else []


def job_of(model: Model, use: Use, strategy: Strategy, gpu: GPU | None) -> Job:
    """The job that a question with the use's options means."""
    from memfit.plan.card import options_of

    layouts = frozenset(name for name, _ in strategy.uses())
    options = options_of(use, model)
    usual = assumed(options, model.config, layouts, "bf16" if gpu is None else gpu.half)
    return Job(**{**usual, **options})


def served(
    model: Model, quant: str, cluster: Cluster, context: int, *, whole: bool = True
) -> Served | None:
    """What llama.cpp takes with every layer on the GPU, or with those that it has room for."""
    from memfit.api.engine import answered, device_of, subject_for
    from memfit.plan.card import Served
    from memfit.serving import find_engine
    from memfit.serving.base import Question

    engine, problems = find_engine("llama.cpp"), list[Problem]()
    try:
        subject = subject_for(engine, f"{model.name}:{quant}", offline=True)
        asked = Question(
            subject=subject,
            devices=(device_of(cluster),) * cluster.gpus,
            options={"context": context, **({"gpu_layers": ALL_LAYERS} if whole else {})},
            version="",
        )
        found = answered(engine, asked, problems)
    except InputError:
        return None
    speed = found.speed
    return Served(
        device=found.device,
        host=found.host,
        fits=found.fits,
        tokens_per_second=None if speed is None else speed.at_longest,
        host_bandwidth=0.0 if speed is None else speed.host_bandwidth or 0.0,
    )


def spelled(found: Card, subject: str, place: str) -> Card:
    """With the commands that ask for each row, and for what would make it fit."""
    from memfit.commands import gpu_words

    config, half = found.model.config, found.cluster.gpu.half

    def worded(one: Row) -> Row:
        if one.use.gguf:
            words = ["memfit estimate", shlex.quote(f"{subject}:{one.use.gguf}")]
            text = " ".join([*words, "--engine llama.cpp", place])
            return dataclasses.replace(one, command=text)
        if one.use.server:
            return dataclasses.replace(one, command=server_command(one.use, found, subject, place))
        strategy = found.strategies[one.use.key]
        text = command(subject, one.job, place, strategy, config, half)
        way = one.way
        if way is not None and way.cluster is not None:
            other = gpu_words(way.cluster)
            more = command(subject, way.job, other, way.strategy, config, way.cluster.gpu.half)
            way = dataclasses.replace(way, command=more)
        return dataclasses.replace(one, command=text, way=way)

    return dataclasses.replace(found, rows=tuple(worded(one) for one in found.rows))


def server_command(use: Use, found: Card, subject: str, place: str) -> str:
    """The longest request is the context that users are counted for."""
    from memfit.plan.served_rows import server, server_options

    planned = server()
    words = planned.words(server_options(use.server, found.cluster, found.context))
    start = f"memfit estimate {shlex.quote(subject)} --engine {planned.engine.name}"
    return " ".join([start, *words, place])


def smallest_command(one: Smallest, known: Smallests, subject: str) -> Smallest:
    if one.gpu is None:
        return one
    job = job_of(known.model, one.use, Strategy(), one.gpu)
    text = command(
        subject, job, f"--gpu {one.gpu.id}", Strategy(), known.model.config, one.gpu.half
    )
    return dataclasses.replace(one, command=text)


__all__ = ["WELL_KNOWN", "answer", "card", "name_on_disk", "question"]
