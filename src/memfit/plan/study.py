"""The matrix of ways to fine-tune: what each needs and takes for every model, machine and length,
and which one to begin with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import product
from typing import Annotated, Any

from memfit.constants import counted, setting
from memfit.errors import InputError
from memfit.estimate import Band, of_worst_rank, uncollected
from memfit.hardware import Cluster
from memfit.hardware import usable as offered
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.lower.walk_cache import remembering
from memfit.model.model import Model
from memfit.presentation import Presented
from memfit.strategy import Strategy
from memfit.uses import strategy_from

METHODS = ("full", "lora", "qlora")
CHECKPOINTING = ("none", "full")
ATTENTION = ("eager", "sdpa")
FLASH: Annotated[
    tuple[int, int],
    counted(
        "compute capability from which torch and flash-attn have FlashAttention-2",
        "Dao-AILab/flash-attention README.md, torch 2.13 sdp_utils.cpp",
    ),
] = (8, 0)
OFFLOAD = {
    "ZeRO-2 + offload": "zero,stage=2,auto,offload-optimizer=cpu",
    "ZeRO-3 + offload": "zero,stage=3,auto,offload-optimizer=cpu,offload-param=cpu",
}
SPREAD: Mapping[str, str] = {
    "DDP": "ddp",
    "ZeRO-1": "zero,stage=1,auto",
    "ZeRO-2": "zero,stage=2,auto",
    "ZeRO-3": "zero,stage=3,auto",
    **OFFLOAD,
}
ALONE: Mapping[str, str] = {"one GPU": "", **OFFLOAD}
CLOSE: Annotated[
    float,
    setting("share of a step's time within which the smaller of two ways is preferred"),
] = 0.02
TENS: Annotated[int, setting("parameters that are called tens of billions")] = 10**10
HUNDREDS: Annotated[int, setting("parameters that are called hundreds of billions")] = 10 * TENS
LONG: Annotated[int, setting("tokens from which a context is called long")] = 4096


@dataclass(frozen=True, kw_only=True)
class Way:
    """`layout` is a key of `SPREAD` or `ALONE`, or a layout as `--use` takes it."""

    method: str
    checkpointing: str
    attention: str
    layout: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`refused` says why there is no answer. Bytes of the worst rank; `seconds` of a step, where
    they are known."""

    way: Way
    refused: str = ""
    verdict: str = ""
    device: int = 0
    reserved: int = 0
    allocated: int = 0
    host: int = 0
    band: Band | None = None
    seconds: float | None = None

    @property
    def fits(self) -> bool:
        return self.verdict == "fits"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """All ways for one model on one machine at one length."""

    model: str
    parameters: int
    cluster: Cluster
    seq: int
    batch: int
    cells: tuple[Cell, ...]

    @property
    def usable(self) -> int:
        return offered(self.cluster.gpu)

    @property
    def flash(self) -> bool:
        return (self.cluster.gpu.sm or FLASH) >= FLASH


@dataclass(frozen=True, kw_only=True, repr=False)
class Study(Presented):
    """The result of a study. `whole`: it was not interrupted."""

    matrix: Matrix = field(repr=False)
    panels: tuple[Panel, ...]
    defaults: tuple[Default, ...]
    whole: bool = True


@dataclass(frozen=True, kw_only=True)
class Default:
    """What to begin with in a situation: it fits in most of its cases, and of those that do it is
    the quickest, `slower` than the quickest of each case on average; `memory`: its share of the
    GPU. Offload is chosen only where nothing else fits as often. `method` empty: of all methods."""

    situation: str
    method: str
    cases: int
    way: Way | None
    fits: int = 0
    slower: float | None = None
    memory: float = 0.0


Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """What a study covers. An empty `precision` means 16 bits as transformers' Trainer has them, in
    the format that the GPU supports. Layers beside 4-bit ones stay in 16 bits, as in TRL since
    0.26. `assumed`: the trainer's defaults that nobody named, of each method."""

    models: Sequence[Model]
    clusters: Sequence[Cluster]
    lengths: Sequence[int]
    methods: Sequence[str] = METHODS
    layouts: Sequence[str] = ()  # of `SPREAD` and `ALONE`, or as `--use` takes it; empty: all
    checkpointing: Sequence[str] = CHECKPOINTING
    attention: Sequence[str] = ATTENTION
    base: Job = field(default_factory=Job)
    precision: str = ""
    assumed: Mapping[str, Any] = field(default_factory=dict)

    def places(self) -> Iterator[tuple[Model, Cluster, int]]:
        yield from product(self.models, self.clusters, self.lengths)

    def ways(self, cluster: Cluster) -> Iterator[Way]:
        known = SPREAD if cluster.gpus > 1 else ALONE
        other = [name for name in self.layouts if name not in SPREAD and name not in ALONE]
        layouts = [name for name in known if not self.layouts or name in self.layouts]
        for method, checkpointing, attention, layout in product(
            self.methods, self.checkpointing, self.attention, [*layouts, *other]
        ):
            yield Way(
                method=method, checkpointing=checkpointing, attention=attention, layout=layout
            )

    def job(self, way: Way, cluster: Cluster, seq: int) -> Job:
        precision = self.precision or numbers(way.method, cluster)
        return self.base.replace(
            method=way.method,
            checkpointing=way.checkpointing,
            attention=way.attention,
            seq=seq,
            precision=precision,
            prepare_kbit=self.base.framework == "trl",
        )


def numbers(method: str, cluster: Cluster) -> str:
    """Full training steps fp32 weights, as ZeRO's own copies are; adapters stand in fp32 beside
    16-bit weights."""
    half = cluster.gpu.half
    return f"autocast-{half}" if method == "full" else f"{half}-autocast"


def strategy(way: Way, cluster: Cluster) -> Strategy:
    words = (SPREAD if cluster.gpus > 1 else ALONE).get(way.layout, way.layout)
    return strategy_from(tuple(words.split()), cluster.gpus)


def study(matrix: Matrix, progress: Progress = lambda done, total, words: None) -> Study:
    """Every cell. Ctrl-C stops it and keeps the cells computed so far."""
    with uncollected(), remembering():
        return _study(matrix, progress)


def _study(matrix: Matrix, progress: Progress) -> Study:
    places = list(matrix.places())
    total = sum(len(list(matrix.ways(cluster))) for _, cluster, _ in places)
    panels: list[Panel] = []
    done, whole = 0, True
    for model, cluster, seq in places:
        cells: list[Cell] = []
        try:
            for way in matrix.ways(cluster):
                progress(done, total, f"{model.name} {seq} {way.method} {way.layout}")
                cells.append(cell(matrix, model, cluster, seq, way))
                done += 1
        except KeyboardInterrupt:
            whole = False
        if cells:
            panels.append(
                Panel(
                    model=model.name,
                    parameters=model.parameters,
                    cluster=cluster,
                    seq=seq,
                    batch=matrix.base.batch,
                    cells=tuple(cells),
                )
            )
        if not whole:
            break
    progress(done, total, "")
    return Study(
        matrix=matrix,
        panels=tuple(panels),
        defaults=tuple(defaults(panels, matrix.methods)),
        whole=whole,
    )


def cell(matrix: Matrix, model: Model, cluster: Cluster, seq: int, way: Way) -> Cell:
    try:
        job, layout = matrix.job(way, cluster, seq), strategy(way, cluster)
        found = of_worst_rank(model, job, cluster, layout)
    except InputError as bad:
        return Cell(way=way, refused=bad.problems[0].message)
    return Cell(
        way=way,
        verdict=found.verdict or "",
        device=found.device,
        reserved=found.memory.reserved or 0,
        allocated=found.memory.allocated,
        host=found.host.size,
        band=found.band,
        seconds=None if found.time is None else found.time.seconds,
    )


# ------------------------------------------------------------------------------ what to begin with
Situation = Callable[[Panel], bool]
SITUATIONS: Mapping[str, Situation] = {
    "several GPUs": lambda panel: panel.cluster.gpus > 1,
    "one GPU": lambda panel: panel.cluster.gpus == 1,
    "a few GPUs (2 to 8)": lambda panel: 1 < panel.cluster.gpus <= 8,
    "many GPUs": lambda panel: panel.cluster.gpus > 8,
    "little memory (16-bit weights take over half of a GPU)": lambda panel: (
        4 * panel.parameters > panel.usable
    ),
    f"long context ({LONG} tokens and more)": lambda panel: panel.seq >= LONG,
    "long context on GPUs without FlashAttention": lambda panel: (
        panel.seq >= LONG and not panel.flash
    ),
    "tens of billions of parameters": lambda panel: TENS <= panel.parameters < HUNDREDS,
    "hundreds of billions": lambda panel: panel.parameters >= HUNDREDS,
}


def defaults(panels: Sequence[Panel], methods: Sequence[str]) -> Iterator[Default]:
    """For each situation that was studied, of all methods and of each. Situations with the same
    cases are one."""
    seen: list[list[Panel]] = []
    for name, belongs in SITUATIONS.items():
        cases = [panel for panel in panels if belongs(panel)]
        several = [panel for panel in cases if panel.cluster.gpus > 1]
        cases = several or cases  # one GPU has layouts of its own, and a situation named for it
        if not cases or cases in seen:
            continue
        seen.append(cases)
        for method in ("", *methods) if len(methods) > 1 else methods:
            yield default(name, cases, method)


def default(situation: str, panels: Sequence[Panel], method: str) -> Default:
    found = [scored(way, panels, method) for way in ways_of(panels) if method in ("", way.method)]
    most = max((one.fits for one in found), default=0)
    without = [one for one in found if one.way.layout not in OFFLOAD]
    if any(one.fits == most for one in without):  # offload is for what fits in no other way
        found = without
    best = min(found, key=lambda one: one.rank, default=None)
    if best is None or not best.fits:
        return Default(situation=situation, method=method, cases=len(panels), way=None)
    near = [
        one
        for one in found
        if one.fits == best.fits and one.slower is not None and best.slower is not None
    ]
    near = [one for one in near if (one.slower or 0) <= (best.slower or 0) + CLOSE] or [best]
    chosen = min(near, key=lambda one: one.memory)
    return Default(
        situation=situation,
        method=method,
        cases=len(panels),
        way=chosen.way,
        fits=chosen.fits,
        slower=chosen.slower,
        memory=chosen.memory,
    )


@dataclass(frozen=True, kw_only=True)
class Score:
    way: Way
    fits: int
    slower: float | None
    memory: float

    @property
    def rank(self) -> tuple[float, ...]:
        """Smaller is better: most cases first, then those whose time is known, then the
        quickest."""
        return (-self.fits, self.slower is None, self.slower or 0.0, self.memory)


def ways_of(panels: Iterable[Panel]) -> tuple[Way, ...]:
    """The ways to train in a study. Flash attention and its replacement count as one."""
    return tuple(dict.fromkeys(fused(one.way) for panel in panels for one in panel.cells))


def fused(way: Way) -> Way:
    return (
        way
        if way.attention == "eager"
        else Way(
            method=way.method, checkpointing=way.checkpointing, attention="fused", layout=way.layout
        )
    )


def scored(way: Way, panels: Sequence[Panel], method: str) -> Score:
    """How much slower a way is: the geometric mean over the cases in which it fits, each
    relative to the fastest way with the same method that fits there, without offload if this way
    has none."""
    fits, ratios, shares = 0, [], []
    known = True
    for panel in panels:
        mine = next((one for one in panel.cells if fused(one.way) == way and one.fits), None)
        if mine is None:
            continue
        fits += 1
        shares.append(mine.device / panel.usable)
        alike = [
            one
            for one in panel.cells
            if one.fits
            and method in ("", one.way.method)
            and (way.layout in OFFLOAD or one.way.layout not in OFFLOAD)
        ]
        best = min((one.seconds for one in alike if one.seconds), default=None)
        if mine.seconds and best:
            ratios.append(math.log(mine.seconds / best))
        known = known and bool(mine.seconds)
    slower = math.exp(sum(ratios) / len(ratios)) - 1 if ratios and known else None
    return Score(
        way=way, fits=fits, slower=slower, memory=sum(shares) / len(shares) if shares else 0.0
    )


__all__ = [
    "Cell",
    "Default",
    "Matrix",
    "Panel",
    "Study",
    "Way",
    "fused",
    "numbers",
    "strategy",
    "study",
]
