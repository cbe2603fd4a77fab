"""CUDA graphs: which batch sizes vLLM captures, and what the graphs keep."""

from __future__ import annotations

from memfit.serving.vllm.setup import Setup


def graph_bytes(setup: Setup) -> int:
    """Bytes that capturing adds."""
    return 0
