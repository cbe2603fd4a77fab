"""Parts of an estimate other than memory: the likely range, parameter counts, and the answers to
further questions."""

from __future__ import annotations

from typing import Annotated

from memfit.constants import setting
from memfit.hardware import Cluster
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.simulate.memory import Moment
from memfit.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Band:
    """The likely range of device memory; `origin` names the evidence. `least`: bytes that every
    allocator needs; a GPU with less is too small for certain."""

    low: int
    high: int
    origin: str
    least: int = 0


@dataclass(frozen=True, kw_only=True)
class Parameters:
    total: int
    trainable: int
    active: int  # of the total, those that one token passes through


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The allocation that fails on this GPU: bytes requested and bytes left."""

    at: Moment
    asked: int
    left: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """To a reverse question: `value` is None where nothing fits. `tried` are (what, verdict,
    device) for the settings looked at."""

    question: str
    value: int | str | None
    device: int | None = None
    limit: str = ""  # what else ended the search
    tried: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A change to the job, beside those before it: bytes of the device that it frees, how much
    longer a token then takes than as it was (None where no time is known), and what is needed then;
    `host`: bytes that each rank has on the host, where they become more."""

    name: str
    freed: int
    slower: float | None
    device: int
    verdict: str
    host: int | None = None


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to make a job fit: `names` are its changes, the other fields the resulting job.
    `rungs` are the steps, with `--advise`. `command` is what to type, if the question came in
    words."""

    kind: str
    names: tuple[str, ...]
    job: Job
    strategy: Strategy
    cluster: Cluster | None
    device: int
    verdict: str
    host: int
    rungs: tuple[Rung, ...] = ()
    command: str = ""

    @property
    def slower(self) -> float | None:
        """How much longer a token then takes; None where no time is known."""
        return self.rungs[-1].slower if self.rungs else None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Ways that make it fit, the best first: none where it fits as it is, and none where no known
    change helps (`helps` is False)."""

    ways: tuple[Way, ...]
    helps: bool

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """Those of the best way."""
        return self.ways[0].rungs if self.ways else ()


@dataclass(frozen=True, kw_only=True)
class Script:
    """A program that was traced in the place of a model and a job, and the optimizer steps it was
    followed for."""

    path: str
    arguments: tuple[str, ...]
    steps: int
    files: tuple[File, ...] = ()  # that it would have written, largest first
    isolation: str = ""  # by what it was kept from changing anything
    gaps: str = ""  # what that leaves open


@dataclass(frozen=True, kw_only=True)
class File:
    path: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of the ranks whose memory differs, and how many are like it."""

    rank: int
    alike: int
    allocated: int
    device: int
    verdict: str | None


@dataclass(frozen=True, kw_only=True)
class RunStep:
    """A step of a run over real lengths: tokens per sequence of its longest batch, the allocated
    peak in it, and what the allocator has reserved when it is over."""

    step: int
    tokens: int
    allocated: int
    reserved: int


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The texts of a dataset, in tokens: before they are cut at `limit`, which `cut` of them are
    longer than."""

    origin: str
    total: int
    mean: float
    median: int
    p99: int
    longest: int
    limit: int
    cut: float  # a share
    empty: int = 0  # texts without a token, which are left out


@dataclass(frozen=True, kw_only=True)
class WorstBatch:
    """The longest batch of the order that was replayed. `line`: of its longest text in the file;
    0 where there is none."""

    step: int
    tokens: int
    line: int
    allocated: int


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """What a Trainer saves, and how often: bytes of the trained weights and of the optimizer's
    states on this rank. They are copied to CPU memory one tensor after the other."""

    count: int
    weights: int
    states: int


COMPARED: Annotated[int, setting("steps that every change of a run is replayed for")] = 200


@dataclass(frozen=True, kw_only=True)
class RunChange:
    """What a change to the run would do: `reserved` at the end, the probability that it runs out of
    memory, and how much longer the run takes (0.1: by a tenth), each None where it is not known."""

    name: str
    flags: str
    reserved: int | None
    probability: float | None
    slower: float | None = None


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """Many steps of different lengths. `steps` are those of one seeded order, replayed through the
    allocator without a limit. `died` and `retries`: what the same order does within the memory of
    the GPU: the step that runs out of memory, and how often the cache is freed. `died_in` says
    where: load, step, or the evaluation or merge after that step.

    `probability`: that the run fails so, over seeded orders and over how far estimates are off;
    `by` has it after some steps, and half of the failures come up to step `half`. `padding` is the
    share of padding among all tokens; `seconds` are those of the whole run."""

    texts: Texts
    order: str
    seed: int
    epoch: int  # steps of one epoch
    steps: tuple[RunStep, ...]
    worst: WorstBatch
    evaluation: int | None
    reserved: int
    allocated: int
    probability: float | None
    by: tuple[tuple[int, float], ...]
    half: int | None
    orders: int
    died: int | None
    died_in: str
    retries: int
    squeezed: int | None
    padding: float
    seconds: float | None
    tokens_per_second: float | None
    replays: int
    changes: tuple[RunChange, ...] = ()
    checkpoints: Checkpoints | None = None  # None where gathering sharded weights is not modelled
