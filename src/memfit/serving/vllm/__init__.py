"""vLLM: weights as it loads them, its profiling run, and its KV cache."""

from __future__ import annotations

from memfit.serving.vllm.engine import VLLM

ENGINE = VLLM()

__all__ = ["ENGINE"]
