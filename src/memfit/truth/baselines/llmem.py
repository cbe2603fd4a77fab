"""LLMem's formulas and its Algorithm 1 (Kim et al., IJCAI 2024, arXiv 2404.10933; `data/llmem.md`
has them in full): ColossalAI's Gemini, fp16 over fp32 states, gradient checkpointing always on. Its
m_base was measured on a live GPU; the middle of the context's range stands for it, and the chunks
that the rest of the weights is rounded up to are not published."""

from __future__ import annotations

from memfit.hardware import GPU, context
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.model.modules import Embedding
from memfit.plan.llmem import METHODS, Way, chosen
from memfit.strategy import Strategy
from memfit.truth.baselines.base import Baseline

PAGE = 2 << 20
B16, B32 = 2, 4
WIDE_LOGITS = ("codegen", "gpt_neo")  # compute them in fp32


def paged(size: int) -> int:
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True, kw_only=True)
class Terms:
    """m_base, m_p16, m_p32, m_os, m_out, m_lm of the paper, and m_back of tensor parallelism before
    the share of other ranks."""

    base: int
    half: int
    full: int
    states: int
    outputs: int
    head: int
    boundaries: int

    def one(self) -> int:
        return self.base + self.half + self.full + self.states + self.outputs + self.head

    def zero3(self, gpus: int) -> int:
        """Weights in 16 bits are gathered to compute, and so not divided."""
        return self.base + self.half + (self.full + self.states) // gpus + self.outputs + self.head

    def tensors(self, gpus: int) -> int:
        weights = (self.half + self.full + self.states) // gpus
        return self.base + weights + self.outputs + self.head + self.back(gpus)

    def both(self, gpus: int, tensors: int) -> int:
        return self.zero3(gpus) - self.half * tensors // gpus + self.back(tensors)

    def back(self, tensors: int) -> int:
        return self.boundaries * (tensors - 1) // tensors

    def of(self, method: str, gpus: int, tensors: int) -> int:
        if method == "DP":
            return self.one()
        return (
            self.zero3(gpus)
            if method == "ZeRO-3"
            else self.tensors(gpus)
            if method == "TP"
            else self.both(gpus, tensors)
        )


def terms(model: Model, batch: int, seq: int, gpu: GPU | None) -> Terms:
    span = context(gpu) if gpu is not None else None
    head = model.head.inputs * model.head.outputs
    embeds = sum(
        weight.count
        for module in model.embed
        if isinstance(module, Embedding)
        for weight in module.weights()
    )
    other = model.parameters - embeds - (0 if model.tied else head)
    states = 8 * sum(
        weight.count
        for weight in model.weights()
        if weight.role in ("linear", "embedding", "expert", "router")
    )
    boundary = paged(batch * seq * model.width * B16)
    scores = B32 if model.family in WIDE_LOGITS else B16
    logits = paged(batch * seq * model.vocab * scores) + 2 * paged(
        batch * (seq - 1) * model.vocab * scores
    )
    return Terms(
        base=(span.low + span.high) // 2 if span is not None else 0,
        half=paged(embeds * B16) + paged(other * B16),
        full=paged(embeds * B32) + paged(other * B32),
        states=paged(states),
        outputs=(len(model.layers) + len(model.embed)) * boundary,
        head=logits + paged(head * B16),
        boundaries=len(model.layers) * boundary,
    )


def applies(job: Job) -> bool:
    return job.training and job.method == "full" and job.optimizer.startswith("adam")


def estimate(model: Model, job: Job, gpu: GPU | None) -> int | None:
    return terms(model, job.batch, job.seq, gpu).one() if applies(job) else None


def spread(model: Model, job: Job, gpu: GPU | None, strategy: Strategy) -> int | None:
    """Fully sharded data parallelism, tensor parallelism, or both; it knows no other."""
    sharded = (strategy.fsdp is not None and strategy.fsdp.reshard) or (
        strategy.zero is not None and strategy.zero.stage == 3
    )
    names = {name for name, _ in strategy.uses()}
    if not applies(job) or not names <= {"fsdp", "zero", "tp"} or (names != {"tp"} and not sharded):
        return None
    found, tensors = terms(model, job.batch, job.seq, gpu), strategy.size("tp")
    if names == {"tp"}:
        return found.tensors(tensors)
    return found.both(strategy.ranks, tensors) if tensors > 1 else found.zero3(strategy.ranks)


def largest(model: Model, seq: int, gpu: GPU, layout: tuple[str, int, int]) -> int:
    """The batch of Algorithm 1: raised from 1 until the peak exceeds the GPU; 0 where not even one
    sequence fits."""
    batch = 0
    while terms(model, batch + 1, seq, gpu).of(*layout) <= gpu.memory:
        batch += 1
    return batch


def choice(model: Model, seq: int, gpu: GPU, gpus: int, tensors: int = 2) -> str:
    """What Algorithm 1 takes by these formulas; `tensors` of DP+TP."""
    data = {"DP": gpus, "ZeRO-3": gpus, "TP": 1, "DP+TP": gpus // tensors}
    return chosen(
        Way(method, largest(model, seq, gpu, (method, gpus, tensors)), data[method])
        for method in METHODS
    )


BASELINE = Baseline(
    name="LLMem",
    cite="Kim et al., LLMem, IJCAI 2024, arXiv 2404.10933",
    estimate=estimate,
    spread=spread,
)
