"""The search space: every combination of a job's open options and of layouts over the GPUs.

Which values an option is tried with stands beside the option (`tries`, in `job.py` and
`strategy.py`); which combinations are legal the techniques say. Candidates that run the same
kernels are one `Kernels`: they differ in the optimizer, the micro-batch and the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import cached_property
from itertools import product
from typing import Annotated, Any, NamedTuple, TypeAlias

from memfit.constants import setting
from memfit.errors import InputError, Problem
from memfit.formats import FORMATS
from memfit.hardware import Cluster
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.plan.goals import Asked
from memfit.program import Program
from memfit.strategy import LAYOUTS, ONE, Layout, Strategy
from memfit.techniques import marked
from memfit.techniques.activation_offload import HOOKS
from memfit.techniques.framework import facts_of

OUTER = ("optimizer",)  # open options that change no kernel of the passes
AXES: Mapping[str, tuple[Any, ...]] = {
    one.name: one.metadata["tries"] for one in dataclasses.fields(Job) if one.metadata["tries"]
}
GOOD_PART: Annotated[float, setting("share of a GPU that counts as a good part of it")] = 0.02
INNER = ("tp", "cp", "pp")  # what they take of the GPUs, replicas and shards share the rest
SHARED = ("ddp", "fsdp", "zero")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be done, however it is done: `job` is what all candidates have in common, `axes`
    are the options in which they differ, `sequences` those of one optimizer step on all GPUs
    together. `strategies`: the layouts to choose from, where they are named."""

    model: Model
    job: Job
    axes: Mapping[str, tuple[Any, ...]]
    sequences: int
    batches: tuple[int, ...] = ()
    strategies: tuple[Strategy, ...] = ()
    offload: bool = True
    without: tuple[str, ...] = ()  # layouts that are not looked at
    parked: bool = False  # whether checkpoints wait on the host
    sparing: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # values tried first
    usual: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # options of each method
    assumed: Mapping[str, Any] = field(default_factory=dict)  # the trainer's, that nobody named
    serving: Asked | None = None  # then answers are made, and nothing is trained

    @property
    def tokens(self) -> int:
        return self.sequences * self.job.seq

    def job_of(self, kernels: Job, optimizer: str, batch: int, times: int) -> Job:
        return kernels.replace(optimizer=optimizer, batch=batch, accumulate=times)


Part: TypeAlias = "tuple[tuple[str, Layout], ...]"  # layouts by name


class Candidate(NamedTuple):
    job: Job
    strategy: Strategy


def divisors(number: int) -> list[int]:
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


class Space:
    """All candidates for some work on some GPUs, never written down at once."""

    def __init__(self, work: Work, cluster: Cluster) -> None:
        self.work, self.cluster = work, cluster
        self.refused: dict[str, str] = {}  # what was refused, and why the last time
        self.known: dict[str, tuple[Layout, ...]] = {}
        self.told: dict[Strategy, str | None] = {}

    @cached_property
    def kernels(self) -> tuple[Job, ...]:
        """Jobs that differ in the kernels of their passes, the most precise and simplest first;
        options that do not go together are left out."""
        names = [name for name in self.work.axes if name not in OUTER]
        found: dict[Job, None] = {}
        for values in product(*(self.values(name) for name in names)):
            options = dict(zip(names, values, strict=True))
            usual = self.work.usual.get(options.get("method", self.work.job.method), {})
            if any(options.get(name, value) != value for name, value in usual.items()):
                continue
            try:
                found[self.work.job.replace(**options)] = None
            except InputError as bad:
                self.refused.setdefault(bad.problems[0].message, bad.problems[0].hint)
        jobs = tuple(job for job in found if self.runs(job))
        return tuple(filter(None, map(self.parked, jobs))) if self.work.parked else jobs

    def parked(self, job: Job) -> Job | None:
        """With what its checkpoints keep on the host, where that of one sequence takes a good part
        of the GPU."""
        kind, model = HOOKS.get(job.framework, ""), self.work.model
        if not (
            kind
            and self.work.offload
            and job.training
            and job.checkpointing == "full"
            and job.activation_offload == "none"
        ):
            return None
        inputs = len(model.layers) * job.seq * model.width * FORMATS[model.dtype].block_bytes
        if inputs < GOOD_PART * self.cluster.gpu.memory:
            return None
        one = job.replace(activation_offload=kind)
        return one if self.runs(one) else None

    def values(self, name: str) -> tuple[Any, ...]:
        values = self.work.axes[name]
        if name == "precision" and values == AXES["precision"] and self.cluster.gpu.half == "fp16":
            values = ("fp16", "autocast-fp16")
        return values

    def runs(self, job: Job) -> bool:
        """Whether the techniques take it on one GPU, whatever the layout."""
        wrong = [
            one
            for one in problems(self.work.model, job, self.cluster, ONE)
            if not one.where.startswith("use")
        ]
        if wrong:
            self.refused.setdefault("options", wrong[0].message)
        return not wrong

    @property
    def optimizers(self) -> tuple[str, ...]:
        return tuple(self.work.axes.get("optimizer", (self.work.job.optimizer,)))

    @cached_property
    def strategies(self) -> tuple[Strategy, ...]:
        """Layouts over all GPUs that at least the first of the jobs can have."""
        named = self.work.strategies
        offered = named or tuple(self.layouts() if self.cluster.gpus > 1 else self.single())
        legal = [one for one in dict.fromkeys(offered) if self.work.offload or not one.offloads]
        legal = [
            one
            for one in legal
            if not any(one.size(name) > 1 or getattr(one, name) for name in self.work.without)
        ]
        return tuple(one for one in legal if self.takes(one))

    def takes(self, strategy: Strategy) -> bool:
        """Whether any method of the first kernels goes with it; where none does, what the first of
        them lacks is kept."""
        few = strategy if self.mixtures else least(strategy)
        if few not in self.told:
            self.told[few] = self.lacking(few)
        lacking = self.told[few]
        if lacking is None:
            return self.counts(strategy)
        self.refused.setdefault(label(strategy), lacking)
        return False

    def lacking(self, strategy: Strategy) -> str | None:
        """What the first of the methods lacks; None where any of them goes with it."""
        first: tuple[Problem, ...] = ()
        for job in self.plainest:
            wrong = problems(self.work.model, job, self.cluster, strategy)
            if not wrong:
                return None
            first = first or wrong
        return first[0].message if first else ""

    def counts(self, strategy: Strategy) -> bool:
        """Whether every rank gets as many sequences."""
        if self.work.sequences % strategy.data:
            self.refused.setdefault(
                label(strategy),
                f"{strategy.data} ranks do not divide {self.work.sequences} sequences",
            )
            return False
        return True

    @cached_property
    def plainest(self) -> tuple[Job, ...]:
        """A job for each framework and method: the first of theirs."""
        found: dict[tuple[str, str], Job] = {}
        for job in self.kernels:
            found.setdefault((job.framework, job.method), job)
        return tuple(found.values())

    def layouts(self) -> Iterator[Strategy]:
        """Every way to share out the GPUs, with the settings that are tried."""
        gpus = self.cluster.gpus
        known = {name: self.sizes(name) for name in INNER}
        for sizes in product(*known.values()):
            chosen = dict(zip(known, sizes, strict=True))
            taken = chosen["tp"] * chosen["cp"] * chosen["pp"]
            if gpus % taken:
                continue
            inner = [self.variants(name, size) for name, size in chosen.items() if size > 1]
            for outer in self.shared(gpus // taken):
                for layouts in product(*inner, outer, self.experts(gpus // chosen["pp"])):
                    yield from_layouts(dict(pair for part in layouts for pair in part))

    def single(self) -> Iterator[Strategy]:
        """On one GPU: a plain loop, or DeepSpeed's engine for what it keeps on the host."""
        yield ONE
        for layout in variants("zero"):
            one = from_layouts({"zero": dataclasses.replace(layout, size=1)})
            if one.offloads and self.alone("zero", layout, 1):
                yield one

    def variants(self, name: str, size: int) -> list[Part]:
        return [((name, dataclasses.replace(layout, size=size)),) for layout in self.settings(name)]

    def settings(self, name: str) -> tuple[Layout, ...]:
        """The settings of a layout that any of the jobs can have of it by itself."""
        if name not in self.known:
            sizes = divisors(self.cluster.gpus)[1:]
            self.known[name] = tuple(
                one for one in variants(name) if any(self.alone(name, one, size) for size in sizes)
            )
        return self.known[name]

    def alone(self, name: str, layout: Layout, size: int) -> bool:
        wrong: tuple[Problem, ...] = ()
        for job in self.plainest:
            wrong = problems(
                self.work.model,
                job,
                self.cluster,
                from_layouts({name: dataclasses.replace(layout, size=size)}),
            )
            if not wrong:
                return True
        self.refused.setdefault(name, wrong[0].message if wrong else "")
        return False

    def sizes(self, name: str) -> list[int]:
        """Sizes that any of the jobs can have of a layout that splits the model; tensor-parallel
        ranks are on one node."""
        most = self.cluster.gpus_per_node if name == "tp" else self.cluster.gpus
        each = [size for size in divisors(most)[1:] if self.cluster.gpus % size == 0]
        return [
            1,
            *(
                size
                for size in each
                if any(self.alone(name, one, size) for one in self.settings(name))
            ),
        ]

    def shared(self, ranks: int) -> Iterator[list[Part]]:
        """The data-parallel layouts of a number of ranks: replicas, shards, or replicas of
        shards."""
        if ranks == 1:
            yield [()]
            return
        for name in ("ddp", "fsdp", "zero"):
            yield self.variants(name, ranks)
        for size in divisors(ranks)[1:-1]:  # shards within, replicas of them without
            yield [
                (part[0], ("ddp", LAYOUTS["ddp"](size=ranks // size)))
                for part in self.variants("fsdp", size)
            ]

    @cached_property
    def mixtures(self) -> set[int]:
        """How many experts its layers have."""
        return {mixer.experts for mixer in self.work.model.mixtures}

    def experts(self, within: int) -> list[Part]:
        """Nothing, or the experts of a mixture over some of the ranks of a stage."""
        if not self.mixtures or not any(facts_of(job.framework).engine for job in self.plainest):
            return [()]
        sizes = [
            size
            for size in divisors(within)[1:]
            if all(count % size == 0 for count in self.mixtures)
        ]
        return [(), *((("ep", LAYOUTS["ep"](size=size)),) for size in sizes)]

    def batches(self, strategy: Strategy) -> list[tuple[int, int]]:
        """(micro-batch, how many of them) that make up a rank's share of the step, the largest
        first."""
        share = self.work.sequences // strategy.data
        allowed = self.work.batches or (*(2**power for power in range(share.bit_length())), share)
        return [
            (size, share // size)
            for size in sorted(set(allowed), reverse=True)
            if share % size == 0
        ]

    @cached_property
    def size(self) -> int:
        each = sum(len(self.batches(strategy)) for strategy in self.strategies)
        return len(self.kernels) * len(self.optimizers) * each

    def candidates(self) -> Iterator[Candidate]:
        for job, strategy, optimizer in product(self.kernels, self.strategies, self.optimizers):
            for batch, times in self.batches(strategy):
                try:
                    yield Candidate(
                        self.work.job_of(job, optimizer, batch, times), turned(strategy, times)
                    )
                except InputError:
                    continue


def variants(name: str) -> list[Layout]:
    """A layout with every combination of the settings that are tried."""
    kind = LAYOUTS[name]
    tried = {
        one.name: one.metadata["tries"] for one in dataclasses.fields(kind) if one.metadata["tries"]
    }
    return [kind(**dict(zip(tried, values, strict=True))) for values in product(*tried.values())]


def problems(model: Model, job: Job, cluster: Cluster, strategy: Strategy) -> tuple[Problem, ...]:
    """What the techniques say against it."""
    program = Program(
        model=model, job=job, entries=(), weights=model.dtype, gpu=cluster.gpu, strategy=strategy
    )
    try:
        marked(program)
    except InputError as bad:
        return bad.problems
    return ()


def least(strategy: Strategy) -> Strategy:
    """With as few replicas and shards as there can be: of a model without experts no technique asks
    how many share the data, but whether any do (and whether groups that are named divide them)."""
    fsdp, zero = strategy.fsdp, strategy.zero
    if (
        strategy.ep is not None
        or (fsdp is not None and fsdp.reshard_to)
        or (zero is not None and zero.hpz > 1)
    ):
        return strategy
    shared = {name: getattr(strategy, name) for name in SHARED if strategy.size(name) > 2}
    return dataclasses.replace(
        strategy, **{name: dataclasses.replace(layout, size=2) for name, layout in shared.items()}
    )


def turned(strategy: Strategy, times: int) -> Strategy:
    """The layout with the number of micro-batches set for its pipeline."""
    return (
        strategy
        if strategy.pp is None
        else dataclasses.replace(strategy, pp=dataclasses.replace(strategy.pp, micro_batches=times))
    )


def from_layouts(layouts: Mapping[str, Any]) -> Strategy:
    return Strategy(**layouts)


def label(strategy: Strategy) -> str:
    """The kind of a strategy: `fsdp`, `zero 3 + offload`, `tp + pp + ddp`."""
    names: list[str] = []
    for name, layout in sorted(strategy.uses(), key=lambda one: tuple(LAYOUTS).index(one[0])):
        if layout.size == 1 and name not in ("ep", "zero"):
            continue
        if name == "zero" and strategy.zero is not None:
            names.append(f"zero {strategy.zero.stage}")
        elif name == "fsdp" and strategy.fsdp is not None:
            names.append("fsdp1" if strategy.fsdp.version == 1 else "fsdp")
        else:
            names.append(name)
    text = "hsdp" if names == ["ddp", "fsdp"] else " + ".join(names) or "one GPU"
    return f"{text} + offload" if strategy.offloads else text


__all__ = [
    "AXES",
    "Candidate",
    "Space",
    "Work",
    "divisors",
    "label",
    "problems",
    "turned",
    "variants",
]
