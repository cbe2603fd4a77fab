"""SGLang as plans know it."""

from __future__ import annotations

from memfit.serving.base import Question
from memfit.serving.planned import OnRank, PlannedEngine
from memfit.serving.sglang.engine import MOST_RUNNING, SGLang
from memfit.serving.sglang.setup import set_up


def on_rank(question: Question) -> OnRank:
    setup = set_up(question)
    eighth = setup.kv_dtype.startswith("fp8")
    chunk = setup.chunk if setup.chunk > 0 else setup.length
    return OnRank(
        model=setup.model,
        rank=setup.rank,
        cached=1 if eighth else setup.width,
        chunk=chunk,
        requests=setup.running or MOST_RUNNING,
    )


PLANNED = PlannedEngine(
    engine=SGLang(),
    length="context_length",
    users="max_running_requests",
    tensor="tp_size",
    cache="kv_cache_dtype",
    weights="quantization",
    eighths="fp8_e4m3",
    layouts=("pp_size", "dp_size"),
    program="python -m sglang.launch_server --model-path {model}",
    on_rank=on_rank,
)

__all__ = ["PLANNED"]
