"""vLLM as plans know it."""

from __future__ import annotations

from typing import Annotated

from memfit.constants import fitted
from memfit.serving.base import Question
from memfit.serving.planned import OnRank, PlannedEngine
from memfit.serving.subject import known_model
from memfit.serving.vllm.engine import VLLM
from memfit.serving.vllm.setup import set_up
from memfit.serving.vllm.specs import cached_width

# V0 schedules, prepares inputs, samples and detokenizes in one process while the GPU waits
# (engine/llm_engine.py step, 0.6.3). Of V1, which does so in others, no figure is known.
HOST_V0: Annotated[
    float,
    fitted(
        "seconds of a step of vLLM's V0 in which the GPU waits for the host",
        "Qwen2.5-0.5B in 8 and 4 bits, vLLM 0.6.3, A100: 3.89 and 3.83 ms a token, kernels 1.50 "
        "and 1.39 (QwenLM/Qwen3 docs/source/benchmark/speed_benchmark.rst@a912d23)",
    ),
] = 2.4e-3


def on_rank(question: Question) -> OnRank:
    known_model(question.subject)
    setup = set_up(question)
    return OnRank(
        model=setup.model,
        rank=setup.rank,
        cached=cached_width(setup.kv_dtype, setup.width),
        chunk=setup.batched,
        requests=setup.requests,
        host=HOST_V0 if setup.rules.engine == 0 else 0.0,
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
