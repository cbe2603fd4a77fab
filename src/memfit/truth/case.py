"""A published figure as memfit understands it: a Job on a model with the figure to compare, or the
reason why not."""

from __future__ import annotations

from memfit.hardware import GPU
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.strategy import ONE as ONE_GPU
from memfit.strategy import Strategy

# What a figure may stand for, and the words under which it is listed.
METRICS = {
    "peak_allocated": "allocated",
    "peak_active": "allocated",
    "peak_reserved": "reserved",
    "nvidia-smi": "device",
    "peak_allocated_plus_context": "allocated + context",
    "peak_unspecified": "counter not named",
    "allocated_end_of_step": "held after a step",
    "allocated_end_of_generation": "held after generation",
    "weights": "weights",
    "oom": "out of memory",
}


# What a row is about, and so what it takes to answer it.
ONE, SEVERAL, SERVED, KERNEL, SPEED, BROKEN = (
    "one GPU",
    "several GPUs",
    "serving engines",
    "single kernels",
    "speed only",
    "no row",
)
KINDS = (ONE, SEVERAL, SERVED, KERNEL, SPEED, BROKEN)
CONFIDENCES = ("high", "medium", "low")
# it holds the same, by fewer kernels
STANDS = "litgpt's model stands for gpt-fast's, which it was written after"


@dataclass(frozen=True, kw_only=True)
class Case:
    """`model` is a name of the catalog. `value` is in bytes; None for `oom`. `notes` say what was
    assumed in reading the row."""

    id: str
    source: str
    model: str
    job: Job
    gpu: GPU | None
    metric: str
    value: int | None
    scope: str = ""
    confidence: str = ""
    notes: tuple[str, ...] = ()
    stored: str = ""  # `quantization_config` of the checkpoint, as JSON
    strategy: Strategy = ONE_GPU
    rank: int | None = None  # whose memory the figure is; None: the worst rank's
    alike: int = 1  # with `rank`: the most of so many ranks from it on
    attention: str = (
        ""  # the operator that ran, where no option of a job names it: only its time differs
    )
    config: str = ""  # of a model that is in no catalog, as JSON; `model` then is what it is called
    added_tokens: int = 0  # that the program added to the vocabulary before it trained
    lengths_vary: bool = False  # batches are as long as a dataset's texts

    @property
    def kind(self) -> str:
        return SEVERAL if self.strategy else ONE


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A row that was not understood, or that no formula answers: `reason` is one of few, `detail`
    is what it is about."""

    id: str
    source: str
    reason: str
    detail: str = ""
    metric: str = ""
    confidence: str = ""
    task: str = ""
    kind: str = BROKEN


class Unfit(Exception):
    """Raised by readers: this row cannot be expressed, for this reason."""

    def __init__(self, reason: str, detail: object = "") -> None:
        self.reason, self.detail = reason, str(detail)[:120]
        super().__init__(reason)
