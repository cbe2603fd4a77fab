"""LLMem's formula for one GPU (Kim et al., IJCAI 2024, arXiv 2404.10933; `data/llmem.md` has it in full): ColossalAI's Gemini, fp16 over
fp32 states, gradient checkpointing always on. Its m_base was measured on a live GPU; the middle of the context's range stands for it."""

from __future__ import annotations

from memfit.hardware import GPU, context
from memfit.job import Job
from memfit.model.modules import Embedding, Model
from memfit.truth.baselines.base import Baseline

PAGE = 2 << 20
B16, B32 = 2, 4
WIDE_LOGITS = ("codegen", "gpt_neo")  # compute them in fp32


def paged(size: int) -> int:
    return -(-size // PAGE) * PAGE


def estimate(model: Model, job: Job, gpu: GPU | None) -> int | None:
    if not job.training or job.method != "full" or not job.optimizer.startswith("adam"):
        return None
    span = context(gpu) if gpu is not None else None
    base = (span.low + span.high) // 2 if span is not None else 0
    head = model.head.inputs * model.head.outputs
    embeds = sum(weight.count for module in model.embed if isinstance(module, Embedding) for weight in module.weights())
    other = model.parameters - embeds - (0 if model.tied else head)
    weights = paged(embeds * (B16 + B32)) + paged(other * (B16 + B32))  # the chunks that the rest is rounded up to are not published
    states = 8 * sum(weight.count for weight in model.weights() if weight.role in ("linear", "embedding", "expert", "router"))
    boundaries = (len(model.layers) + len(model.embed)) * paged(job.batch * job.seq * model.width * B16)
    scores = B32 if model.family in WIDE_LOGITS else B16
    loss = (
        paged(job.batch * job.seq * model.vocab * scores) + 2 * paged(job.batch * (job.seq - 1) * model.vocab * scores) + paged(head * B16)
    )
    return base + weights + paged(states) + boundaries + loss


BASELINE = Baseline(name="LLMem", cite="Kim et al., LLMem, IJCAI 2024, arXiv 2404.10933, one GPU", estimate=estimate)
