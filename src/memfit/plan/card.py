"""The card of a model and a GPU: inference in 16, 8 and 4 bits, full fine-tuning, LoRA and QLoRA,
each with its longest sequence and largest batch.

Every claim is replayed through the allocator. What lies between is found by the live peak, which is
quick and nearly a line.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar

from memfit.answers import Way
from memfit.constants import setting
from memfit.errors import InputError
from memfit.estimate import estimate, uncollected
from memfit.hardware import GPU, Cluster, usable
from memfit.job import Job
from memfit.lower.walk_cache import remembering
from memfit.model.heads import heads_of, with_head
from memfit.model.model import Model
from memfit.model.quantized import bitsandbytes_options, stored_as
from memfit.plan.advice import Setting, hardware
from memfit.plan.engine_weights import EIGHT, OWN
from memfit.plan.furthest import TRIES, UNIT, Look, furthest
from memfit.plan.served_rows import server, server_on, weights_for
from memfit.presentation import Presented
from memfit.processes import answers
from memfit.program_facts import marked_program
from memfit.strategy import DDP, FSDP, ONE, TP, Strategy, even_split

T = TypeVar("T")
R = TypeVar("R")

CONTEXT: Annotated[int, setting("tokens of each user's context, where users are counted")] = 4096
NEW: Annotated[int, setting("tokens of the context that are generated")] = 128
PAIRED = "seq2seq-lm"  # the head of an encoder with a decoder
MOST: Annotated[int, setting("users or sequences at once that are looked for at most")] = 4096


@dataclass(frozen=True, kw_only=True)
class Use:
    """One thing to do with a model: the options of its question, best first in each group."""

    key: str
    title: str
    options: Mapping[str, Any]
    gguf: str = ""  # the quantization of a GGUF file, which llama.cpp serves
    server: str = ""  # the weights that a server has: as they are, or in 8 bits
    encodes: bool = False  # one forward pass over each sequence, which generates nothing

    @property
    def served(self) -> bool:
        """Whether an engine answers, and not transformers."""
        return bool(self.gguf or self.server)

    @property
    def answers(self) -> bool:
        return self.served or self.options.get("task") == "inference"


ANSWER: Mapping[str, Any] = {"task": "inference", "seq": CONTEXT - NEW, "new_tokens": NEW}
USES = (
    Use(key="16-bit", title="16-bit", options=ANSWER),
    Use(key="8-bit", title="8-bit", options={**ANSWER, "quant": "int8"}),
    Use(key="Q8_0", title="GGUF Q8_0", options={}, gguf="Q8_0"),
    Use(key="4-bit", title="4-bit", options={**ANSWER, "quant": "nf4"}),
    Use(key="Q4_K_M", title="GGUF Q4_K_M", options={}, gguf="Q4_K_M"),
    Use(key="full", title="full", options={"method": "full"}),
    Use(key="lora", title="LoRA", options={"method": "lora"}),
    Use(key="qlora", title="QLoRA", options={"method": "qlora"}),
)

RUN = Use(key="16-bit", title="16-bit", options={"task": "inference"}, encodes=True)


def uses_of(model: Model) -> tuple[Use, ...]:
    """What can be done with this model: the first use runs the weights in the format in which the
    checkpoint stores them; those of bitsandbytes have no others. Encoders are not trained in 4
    bits; those with a decoder have no formulas for inference."""
    if model.encodes:
        trained = tuple(use for use in USES if use.key in ("full", "lora"))
        return trained if PAIRED in heads_of(model.config) else (RUN, *trained)
    if known := bitsandbytes_options(model.config):
        trained = tuple(use for use in USES if use.key == "qlora")
        return (dataclasses.replace(USES[0], title=known["quant"]), *trained)
    stored = stored_as(model)
    return (dataclasses.replace(USES[0], title=stored), *USES[1:]) if stored else USES


def server_uses() -> dict[str, Use]:
    """What a server does with the weights of another use: as they are, and in 8 bits."""
    engine = server().engine
    name, title = engine.name, engine.title
    eight = Use(key=f"{name}-fp8", title=f"{title} FP8", options={}, server=EIGHT)
    return {"16-bit": Use(key=name, title=title, options={}, server=OWN), "8-bit": eight}


def with_servers(model: Model, cluster: Cluster) -> tuple[Use, ...]:
    """The uses of a card: a server's stand behind the same weights under transformers."""
    if model.encodes:
        return uses_of(model)
    behind = server_uses()
    known = weights_for(model, cluster)
    return tuple(
        one
        for use in uses_of(model)
        for one in (use, behind.get(use.key))
        if one is not None and (not one.server or one.server in known)
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """How far a use goes. `job` is the question of the row: its batch is the default one, or the
    largest that fits; `device` and `tokens_per_second` are its answer. `longest` are tokens of one
    sequence, `most` sequences of the default length, or users. `refused` says why there is no
    answer; `way` is what would make it fit. `in_cpu_memory` are bytes there with which the
    rest of the model fits on the GPU, and `device` is that rest."""

    use: Use
    job: Job = field(default_factory=Job)
    fits: bool = False
    device: int = 0
    in_cpu_memory: int = 0
    tokens_per_second: float | None = None
    host_bandwidth: float = 0.0  # bytes per second that this speed assumes of the CPU
    longest: int = 0
    most: int = 0
    refused: str = ""
    way: Way | None = None
    best: bool = False
    command: str = ""
    stays: str = ""  # what a quantization leaves as it is


@dataclass(frozen=True, kw_only=True, repr=False)
class Card(Presented):
    """`rows` are empty where no formulas know the model; `unknown` says why. `subject` is the model
    as it was named."""

    model: Model
    cluster: Cluster
    strategies: Mapping[str, Strategy]
    rows: tuple[Row, ...]
    unknown: str = ""
    subject: str = ""

    @property
    def fits(self) -> bool:
        return any(row.fits for row in self.rows)

    @property
    def context(self) -> int:
        """Tokens of each user's context."""
        return context_of(self.model)


Jobs = Callable[[Model, Use, Strategy, GPU | None], Job]


@dataclass(frozen=True, kw_only=True)
class Served:
    """What an engine says of a model: bytes on the fullest GPU and in CPU memory, whether it
    starts, and tokens per second of one request behind all of its context, with the bytes per
    second that the CPU is assumed to read."""

    device: int
    host: int
    fits: bool
    tokens_per_second: float | None = None
    host_bandwidth: float = 0.0


class Serve(Protocol):
    """Asks an engine for the quantization of a GGUF file and tokens of context: with every layer on
    the GPUs (`whole`), or as many as they have room for. None where it does not know the model."""

    def __call__(
        self, model: Model, quant: str, cluster: Cluster, context: int, *, whole: bool = True
    ) -> Served | None: ...


# Told before each search or model: how many are done, of how many, and what comes next.
Progress = Callable[[int, int, str], None]


def quiet(done: int, total: int, what: str) -> None:
    """Tells nothing."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How a card is asked for: `job_of` resolves the defaults of a use, `serve` asks llama.cpp, and
    `processes` share the searches."""

    job_of: Jobs
    serve: Serve
    processes: int = 1
    progress: Progress = quiet

    def all(self, ask: Callable[[T], R], items: Sequence[T], named: Callable[[T], str]) -> list[R]:
        """The answers in the order of the items. Several processes begin with the last, which take
        longest, so that none of them is left to one process at the end."""
        found: dict[int, R] = {}
        count = len(items)
        order = range(count) if self.processes < 2 else range(count)[::-1]
        self.progress(0, count, named(items[order[0]]))
        some = answers(ask, [items[place] for place in order], self.processes)
        with contextlib.closing(some):
            for place, one in some:
                found[order[place]] = one
                if len(found) < count:
                    following = next(at for at in order if at not in found)
                    self.progress(len(found), count, named(items[following]))
        return [found[place] for place in range(count)]


def card(model: Model, cluster: Cluster, asking: Asking) -> Card:
    uses = with_servers(model, cluster)
    search = partial(row_of, model, cluster, asking.job_of, asking.serve)
    found = asking.all(search, uses, lambda use: use.title)
    spread = {use.key: strategy for use, (_, strategy) in zip(uses, found, strict=True)}
    rows = [one for one, _ in found if not (one.use.server and one.refused)]
    for answering in (True, False):
        fit = [at for at, one in enumerate(rows) if one.fits and one.use.answers is answering]
        if fit:
            # GPUs that work one after the other are the last choice.
            first = min(fit, key=lambda at: spread[rows[at].use.key].size("split") > 1)
            rows[first] = dataclasses.replace(rows[first], best=True)
    return Card(model=model, cluster=cluster, strategies=spread, rows=tuple(rows))


def row_of(
    model: Model, cluster: Cluster, job_of: Jobs, serve: Serve, use: Use
) -> tuple[Row, Strategy]:
    """A row with what would make it fit, and its layout."""
    model = of_use(model, use, job_of, cluster.gpu)
    with uncollected(), remembering():
        if use.gguf:
            return served_row(model, use, cluster, serve), layouts(model, use, cluster)[0]
        if use.server:
            return server_row(model, use, cluster), layouts(model, use, cluster)[0]
        found, strategy = supported_row(model, use, cluster, job_of)
        if not found.fits and not found.refused:
            found = with_way(model, found, cluster, strategy)
        return found, strategy


def of_use(model: Model, use: Use, job_of: Jobs, gpu: GPU | None) -> Model:
    """The model with the head that a use of an encoder has."""
    if not model.encodes:
        return model
    job = job_of(model, use, ONE, gpu)
    return with_head(model, job.head, job.labels)


def layouts(model: Model, use: Use, cluster: Cluster) -> tuple[Strategy, ...]:
    """Over several GPUs: training shards everything; answers split each layer. Where that is not
    supported, each GPU has a copy of the model or, if that does not fit, some layers."""
    size = cluster.gpus
    if size == 1:
        return (ONE,)
    if not use.answers:
        return (Strategy(fsdp=FSDP(size=size)),)
    some = () if use.served or len(model.layers) < size else (even_split(len(model.layers), size),)
    copies = (Strategy(ddp=DDP(size=size)), *(Strategy(split=split) for split in some))
    return Strategy(tp=TP(size=size)), *copies


def supported_row(model: Model, use: Use, cluster: Cluster, job_of: Jobs) -> tuple[Row, Strategy]:
    """The row of the first layout that is supported and fits; of the first supported one where
    none fits. Where layers can be split, no other layout fits if that one does not."""
    known: list[tuple[Row, Strategy]] = []
    for strategy in layouts(model, use, cluster):
        found = row(model, use, cluster, strategy, job_of)
        known.append((found, strategy))
        if not found.refused and (found.fits or strategy.size("tp") > 1):
            return known[-1]
    return next((one for one in known if not one[0].refused), known[0])


def row(model: Model, use: Use, cluster: Cluster, strategy: Strategy, job_of: Jobs) -> Row:
    """The largest batch, then the longest sequence, which has as much beyond its live peak."""
    look = Look(model, cluster, strategy)
    found = batch_row(look, use, job_of)
    return found if found.refused else with_longest(found, longest_row(look, use, job_of))


def batch_row(look: Look, use: Use, job_of: Jobs) -> Row:
    """A row without its longest sequence."""
    model, cluster, strategy = look.model, look.cluster, look.strategy
    job = job_of(model, use, strategy, cluster.gpu)
    try:
        usual = estimate(model, job, cluster, strategy) if look.short(job) <= 0 else None
        stays = unquantized(model, job, cluster, strategy)
        most = furthest(look, job.replace(accumulate=1), "batch", MOST, 1)
        if usual is not None and usual.verdict == "fits":  # also where a smaller batch may not
            most = max(most, job.batch)
        if not most:
            return Row(use=use, job=job.replace(batch=1), stays=stays)
        shown = job.replace(batch=min(1 if use.answers else job.batch, most))
        found = usual if usual and shown == job else estimate(model, shown, cluster, strategy)
    except InputError as bad:
        return Row(use=use, job=job, refused=bad.problems[0].message)
    time = found.time or found.generation
    return Row(
        use=use,
        job=shown,
        stays=stays,
        fits=found.verdict == "fits",
        device=found.device,
        tokens_per_second=None if time is None else time.tokens_per_second,
        most=most * strategy.size("ddp"),  # of all copies
    )


def unquantized(model: Model, job: Job, cluster: Cluster, strategy: Strategy) -> str:
    """What a quantization leaves as it is, in the words of an estimate's warning."""
    if not job.quant:
        return ""
    _, said = marked_program(model, job, cluster.gpu, strategy)
    return next((one.message for one in said if one.where == "job.quant"), "")


def longest_row(look: Look, use: Use, job_of: Jobs) -> Row:
    """The longest sequence of a row alone; of answers only the prompt counts here."""
    job = job_of(look.model, use, look.strategy, look.cluster.gpu)
    alone = job.replace(batch=1, accumulate=1)
    try:
        longest = furthest(look, alone, "seq", positions(look.model, job), 0)
    except InputError as bad:
        return Row(use=use, job=job, refused=bad.problems[0].message)
    return Row(use=use, job=job, longest=longest)


def with_longest(one: Row, other: Row) -> Row:
    """The row of a batch with the longest sequence of the other."""
    if one.refused or other.refused:
        return one if one.refused else other
    longest, answering = other.longest, one.use.answers
    if answering and one.fits:  # which may lie between two round numbers
        longest = max(longest, one.job.seq)
    extra = one.job.new_tokens if answering and (longest or one.most) else 0
    return dataclasses.replace(one, longest=longest + extra)


def served_row(model: Model, use: Use, cluster: Cluster, serve: Serve) -> Row:
    """Memory is a line in the context: two points say where it ends, and that is tried."""
    context = context_of(model)
    first = serve(model, use.gguf, cluster, context)
    if first is None:
        return Row(use=use, refused="llama.cpp has no graph of it in memfit")
    if not first.fits:
        part = serve(model, use.gguf, cluster, context, whole=False)
        if part is None or not part.fits:
            return Row(use=use, device=first.device)
        return Row(
            use=use,
            device=part.device,
            in_cpu_memory=part.host,
            tokens_per_second=part.tokens_per_second,
            host_bandwidth=part.host_bandwidth,
        )
    next_point = serve(model, use.gguf, cluster, 2 * context)
    slope = 0 if next_point is None else max(0, next_point.device - first.device) / context
    room = usable(cluster.gpu) - first.device
    reach = MOST * context if slope == 0 else context + int(room / slope)

    def far(tokens: int, unit: int) -> int:
        """Up to these tokens, in steps back until it fits; one user's context does."""
        for less in range(0, TRIES * unit, unit):
            known = serve(model, use.gguf, cluster, tokens - less)
            if tokens - less <= context or (known is not None and known.fits):
                return max(context, tokens - less)
        return context

    top = positions(model, Job(task="inference", new_tokens=0))
    longest = far(top if top <= reach else reach // UNIT * UNIT, UNIT)
    # slots share one context, which may be longer than one sequence (llama.cpp `-c`, `-np`)
    most = far(min(MOST, reach // context) * context, context) // context
    return Row(
        use=use,
        fits=True,
        device=first.device,
        tokens_per_second=first.tokens_per_second,
        longest=longest,
        most=most,
    )


def server_row(model: Model, use: Use, cluster: Cluster) -> Row:
    context = context_of(model)
    new = min(NEW, context // 2)
    found = server_on(model, use.server, cluster, context, new)
    if found is None:
        return Row(use=use, refused="the server does not support it")
    return Row(
        use=use,
        job=Job(task="inference", seq=context - new, new_tokens=new),
        fits=found.users > 0,
        device=found.device,
        tokens_per_second=found.tokens_per_second,
        longest=found.longest,
        most=found.users,
    )


def options_of(use: Use, model: Model) -> Mapping[str, Any]:
    """The options of a use's question, with a prompt and an answer that the model has positions
    for."""
    if not use.answers or use.served or use.encodes:
        return use.options
    context = context_of(model)
    new = min(use.options["new_tokens"], context // 2)
    return {**use.options, "seq": context - new, "new_tokens": new}


def context_of(model: Model) -> int:
    """Tokens of each user's context: fewer where the model has not so many positions."""
    return min(CONTEXT, model.positions or CONTEXT)


def positions(model: Model, job: Job) -> int:
    """Tokens of a sequence that the model has positions for."""
    known = model.positions or 2**20
    return max(1, known - (0 if job.training else job.new_tokens))


def with_way(model: Model, one: Row, cluster: Cluster, strategy: Strategy) -> Row:
    """What hardware would make a row fit."""
    setting = Setting(one.job, strategy)
    way = next(hardware(model, setting, cluster), None)
    return one if way is None else dataclasses.replace(one, way=way)


__all__ = [
    "USES",
    "Asking",
    "Card",
    "Row",
    "card",
    "options_of",
]
