"""vLLM as plans know it."""

from __future__ import annotations

from memfit.serving.base import Question
from memfit.serving.planned import OnRank, PlannedEngine
from memfit.serving.vllm.engine import VLLM
from memfit.serving.vllm.setup import set_up
from memfit.serving.vllm.specs import cached_width


def on_rank(question: Question) -> OnRank:
    setup = set_up(question)
    return OnRank(
        model=setup.model,
        rank=setup.rank,
        cached=cached_width(setup.kv_dtype, setup.width),
        chunk=setup.batched,
        requests=setup.requests,
    )


PLANNED = PlannedEngine(
    engine=VLLM(),
    length="max_model_len",
    users="max_num_seqs",
    tensor="tensor_parallel_size",
    cache="kv_cache_dtype",
    weights="quantization",
    eighths="fp8",
    layouts=("pipeline_parallel_size", "data_parallel_size"),
    program="vllm serve {model}",
    on_rank=on_rank,
)

__all__ = ["PLANNED"]
