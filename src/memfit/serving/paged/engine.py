"""What the engines of this folder share: their settings, the weights of a rank, the largest step,
and the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from memfit.errors import InputError, Problem, raise_errors
from memfit.hardware.outside import context
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.model.modules import MLP, MoE
from memfit.serving.base import Device, Option, Question, Subject, silicon_problems
from memfit.serving.links import communicator_bytes
from memfit.serving.paged.caches import cache_width, cached
from memfit.serving.result import Pool, ServingAnswer
from memfit.serving.stored import scheme_of
from memfit.serving.subject import known_model
from memfit.serving.vllm.profile import layer_peak
from memfit.serving.weights import (
    Rank,
    attention_heads,
    number_width,
    rank_bytes,
    splits,
)
from memfit.units import GIB

TORCH = (2, 7)  # that the engines of 2025 install, for NCCL's version


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings after the engine's defaults. `cell` is what a token takes in the cache of one
    rank."""

    subject: Subject
    model: Model
    rank: Rank
    options: Mapping[str, Any]
    tensor: int
    gpus: int
    length: int
    step: int
    width: int
    cell: int
    states: int
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of one GPU that the cache cannot have."""

    context: int
    weights: int
    activation: int
    outside: int

    @property
    def all(self) -> int:
        return self.context + self.weights + self.activation + self.outside


Budget = Callable[[Setup, Device, Held], int]


@dataclass(frozen=True, kw_only=True)
class Paged:
    """An engine with a paged cache. `tensor`, `pipeline`, `length` and `step` name its own options;
    `budget` is its rule; `starts` are the words that begin its command line."""

    name: str
    title: str
    newest: str
    options: tuple[Option, ...]
    starts: tuple[tuple[str, ...], ...]
    model_flags: tuple[str, ...]
    budget: Budget
    tensor: str = "tp"
    pipeline: str = ""
    length: str = "session_len"
    step: str = ""
    steps: int = 8192
    block: int = 1
    caches: str = "kv_cache_dtype"
    modelopt: bool = False  # the cache has the numbers that a ModelOpt checkpoint names
    unified: bool = False
    grows: bool = False  # the cache holds what is asked of it, not all that there is room for
    weigh: Callable[[Setup], int] | None = None
    names: Callable[[str], Subject | None] = field(default=lambda name: None)
    config: Callable[[Mapping[str, Any]], Mapping[str, Any]] = field(default=lambda config: config)
    refuses: Callable[[Mapping[str, Any]], list[Problem]] = field(default=lambda options: [])
    log: Callable[[Mapping[str, float]], tuple[str, ...]] = field(default=lambda figures: ())
    rows: Callable[[Mapping[str, Any]], dict[str, Any]] = field(default=dict)
    figures: Callable[[Mapping[str, Any]], dict[str, float]] = field(default=lambda figures: {})
    needs_memory = True

    @property
    def shared_flag(self) -> str:
        found = (one.flags[0] for one in self.options if one.name == self.tensor)
        return "" if self.unified else next(found)

    def read(self, words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """The model and the flags of the engine's own command line."""
        rest = list(words)
        start = next((one for one in self.starts if tuple(rest[: len(one)]) == one), None)
        if start is None:
            raise InputError.one(
                f"`{' '.join(rest[:2])[:60]}` does not start {self.title}",
                where="command",
                hint=f"write `-- {' '.join(self.starts[0])} … MODEL`",
            )
        rest = rest[len(start) :]
        named = rest.pop(0) if rest and not rest[0].startswith("-") else ""
        for index, word in enumerate(rest):
            flag, equals, value = word.partition("=")
            if flag in self.model_flags:
                named = value if equals else rest[index + 1] if index + 1 < len(rest) else ""
        return named, tuple(rest)

    def subject(self, name: str, offline: bool = False) -> Subject | None:
        """A model whose name only this engine understands."""
        return self.names(name)

    def online(self, question: Question) -> tuple[str, ...]:
        return ()

    def row_options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a published row, by name."""
        known = {one.name for one in self.options if not one.silent and one.supported}
        made = {**row, **self.rows(row)}
        return {name: value for name, value in made.items() if name in known and value is not None}

    def row_figures(self, figures: Mapping[str, Any]) -> dict[str, float]:
        """Figures of a published row under the answer's names."""
        return self.figures(figures)

    def row_subject(self, name: str, options: Mapping[str, Any]) -> Subject | None:
        """Rows name their models, as this engine's users do."""
        return self.names(name)

    def answer(self, question: Question) -> ServingAnswer:
        """Weights, the largest step and the cache."""
        setup = set_up(self, question)
        weights = rank_bytes(setup.model, setup.rank) if self.weigh is None else self.weigh(setup)
        device = question.devices[0] if question.devices else None
        if device is None:
            need = setup.length * setup.cell + setup.states
            found = (
                Pool(name="weights", bytes=weights),
                Pool(name="KV cache", bytes=need, how=f"{setup.length:,} tokens"),
            )
            figures = {"weights_gib": weights / GIB, "kv_gib": need / GIB}
            return answer_of(self, question, setup, pools=found, figures=figures)
        return whole(self, question, setup, device, weights)


def whole(
    engine: Paged, question: Question, setup: Setup, device: Device, weights: int
) -> ServingAnswer:
    """With a GPU: what the engine's rule leaves to the cache."""
    gpu = device.gpu
    ranks = communicator_bytes(device, setup.tensor, TORCH)
    held = Held(
        context=0 if gpu is None or engine.unified else context(gpu).high,
        weights=weights,
        activation=largest_step(setup),
        outside=0 if engine.unified else ranks,
    )
    given = engine.budget(setup, device, held) - setup.states
    page = setup.cell * engine.block
    tokens = max(0, given // page) * engine.block if page else 0
    figures = {
        "weights_gib": weights / GIB,
        "activation_gib": held.activation / GIB,
        "kv_gib": tokens * setup.cell / GIB,
        "available_kv_gib": max(0, given) / GIB,
        "kv_tokens": tokens,
        "max_concurrency": tokens / setup.length if setup.length else 0.0,
        "max_concurrency_len": setup.length,
    }
    used = min(tokens, -(-setup.length // engine.block) * engine.block) if engine.grows else tokens
    failure, remedy = "", ""
    if tokens <= 0 and page:
        failure = "out of memory: nothing is left for the cache"
        remedy = more_gpus(engine, setup, device, held)
    elif held.all + used * setup.cell > device.total:
        failure = "out of memory in the largest step: the cache leaves too little"
        remedy = f"a smaller `--{engine.step.replace('_', '-')}`, or a smaller share for the cache"
    found = (
        Pool(name="CUDA context", bytes=held.context),
        Pool(name="weights", bytes=weights),
        Pool(name="largest step", bytes=held.activation),
        Pool(name="NCCL", bytes=held.outside),
        Pool(name="KV cache", bytes=used * setup.cell),
        Pool(name="states", bytes=setup.states),
    )
    return answer_of(
        engine,
        question,
        setup,
        pools=found,
        figures=figures,
        failure=failure,
        remedy=remedy,
    )


def answer_of(
    engine: Paged,
    question: Question,
    setup: Setup,
    *,
    pools: tuple[Pool, ...],
    figures: Mapping[str, float],
    failure: str = "",
    remedy: str = "",
) -> ServingAnswer:
    """The answer with what all cases share."""
    device = question.devices[0] if question.devices else None
    version = question.version or engine.newest
    return ServingAnswer(
        engine=engine.name,
        title=engine.title,
        version=version,
        model=setup.subject.name,
        origin=setup.subject.origin,
        parameters=setup.subject.parameters or setup.model.parameters,
        gpu="" if device is None else device.name,
        gpus=setup.gpus,
        usable=None if device is None else device.total,
        pools=tuple(pool for pool in pools if pool.bytes or pool.name in ("weights", "KV cache")),
        figures=figures,
        log=() if failure or device is None else engine.log(figures),
        failure=failure,
        remedy=remedy,
        problems=(*setup.problems, *notices(engine, setup, figures)),
    )


def notices(engine: Paged, setup: Setup, figures: Mapping[str, float]) -> list[Problem]:
    """That this engine is known in less detail, and that one whole request does not fit."""
    found = []
    tokens = figures.get("kv_tokens")
    if tokens and tokens < setup.length:
        found.append(
            Problem(
                level="warning",
                message=f"the cache holds {int(tokens):,} tokens, less than one request of "
                f"{setup.length:,}",
                where=engine.length,
            )
        )
    found.append(
        Problem(
            level="note",
            message=f"{engine.title} is known in less detail than vLLM, SGLang and llama.cpp: "
            "weights, the largest step, and the fraction that its cache gets",
            where="engine",
        )
    )
    return found


def more_gpus(engine: Paged, setup: Setup, device: Device, held: Held) -> str:
    """The setting under which the weights leave room."""
    if engine.unified:
        return "--q-bits 4"
    for ranks in (2, 4, 8, 16):
        if ranks > setup.tensor and held.weights * setup.tensor / ranks < 0.7 * device.total:
            return f"{engine.shared_flag} {ranks}"
    return "a larger GPU, or weights in fewer bits"


def set_up(engine: Paged, question: Question) -> Setup:
    """The settings, or all problems at once."""
    options = question.options
    subject = replace(question.subject, config=engine.config(question.subject.config))
    model = known_model(subject)
    problems = engine.refuses(options)
    problems += [] if engine.unified else silicon_problems(question, engine.title)
    tensor = int(options.get(engine.tensor) or 1)
    pipeline = int(options.get(engine.pipeline) or 1) if engine.pipeline else 1
    scheme = scheme_of(subject.config, problems)
    problems += split_problems(engine, model, tensor)
    width = number_width(model, options.get("dtype"))
    named = str(options.get(engine.caches) or "auto").lower()
    value = cache_width(subject.config if engine.modelopt else {}, named, width, problems)
    raise_errors(problems)
    length = int(options.get(engine.length) or 0) or model.positions or 2048
    step = int(options.get(engine.step) or 0) if engine.step else 0
    gpu = question.devices[0].gpu if question.devices else None
    rank = Rank(
        tensor=tensor,
        sm=None if gpu is None else gpu.sm,
        width=width,
        scheme=scheme,
        positions=max(model.positions, length),
        layers=(0, -(-len(model.layers) // pipeline)),
        last=pipeline == 1,
    )
    cell, states = cached(model, rank, value)
    return Setup(
        subject=subject,
        model=model,
        rank=rank,
        options=options,
        tensor=tensor,
        gpus=tensor * pipeline,
        length=length,
        step=step or engine.steps,
        width=width,
        cell=cell,
        states=states,
        problems=tuple(problems),
    )


def split_problems(engine: Paged, model: Model, tensor: int) -> list[Problem]:
    """Heads that the ranks cannot share."""
    heads = attention_heads(model)
    if tensor > 0 and (heads is None or heads % tensor == 0):
        return []
    return [
        Problem(
            message=f"{heads} attention heads cannot be split over {tensor} GPUs",
            where=engine.tensor,
            hint=f"use {splits(heads or 0)}",
        )
    ]


def largest_step(setup: Setup) -> int:
    """The largest moment of a step without compilation: the residual, the layer's input and output
    and the feed-forward's input, beside the widest pair of neighbours; weights in fp8 take a copy
    of their input in 8 bits."""
    model, rank, tokens = setup.model, setup.rank, setup.step
    stream = 4 * tokens * model.width * setup.width
    widest = max(
        (
            layer_peak(mixer, rank, tokens, setup.width) + copied(mixer, rank, tokens)
            for mixer in model.mixers
        ),
        default=0,
    )
    return stream + widest


def copied(mixer: object, rank: Rank, tokens: int) -> int:
    """The input of a feed-forward's last product in 8 bits."""
    if rank.scheme.kind != "fp8":
        return 0
    if isinstance(mixer, MLP):
        return tokens * mixer.down.inputs // rank.tensor
    return tokens * mixer.active * mixer.width // rank.tensor if isinstance(mixer, MoE) else 0


def option(
    name: str, kind: str, help: str, *short: str, underscores: bool = False, **more: Any
) -> Option:
    """An option whose flag is its name, with dashes or (as TensorRT-LLM writes it) underscores."""
    spelled = (f"--{name.replace('_', '-')}", f"--{name}")
    spelled = spelled[::-1] if underscores else spelled
    return Option(name=name, flags=(*dict.fromkeys(spelled), *short), kind=kind, help=help, **more)


def share(setup: Setup, name: str, default: float) -> float:
    """A fraction as it is given, 0 too, else the engine's own."""
    given = setup.options.get(name)
    return default if given is None else float(given)


def unsupported(*names: str) -> tuple[Option, ...]:
    """Options that change the memory in ways that memfit does not know yet."""
    return tuple(option(name, "text", "not supported yet", supported=False) for name in names)


def model_option(name: str) -> Option:
    """The option whose value is the model."""
    return option(name, "text", "the model; may also stand alone", silent=True, names_model=True)


def silent(*names: str, kind: str = "text") -> tuple[Option, ...]:
    """Options that do not change the memory."""
    return tuple(option(name, kind, "", silent=True) for name in names)


__all__ = ["Held", "Paged", "Setup", "option", "silent"]
