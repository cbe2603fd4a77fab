"""CUDA graphs: what vLLM sets aside for them before it sizes its cache."""

from __future__ import annotations

from memfit.serving.vllm.setup import Setup
from memfit.units import GIB

# Fitted: the middle of the estimates that 14 logs of 0.20 to 0.26 print (0.08 to 2.67 GiB:
# vllm-0013, 0020, 0022, 0023, 0054, 0055, 0059, 0061, 0062, 0065, 0066, 0069, 0072 and 0077 of the
# published rows; 0013 alone names its GPU, and is left out as evidence). What a graph takes is the
# driver's business, and was not found in any source.
ESTIMATE = int(0.35 * GIB)


def graph_bytes(setup: Setup) -> int:
    """Bytes that vLLM estimates for CUDA graphs, in versions that count them."""
    return 0 if setup.eager or not setup.rules.counted_graphs else ESTIMATE
