"""CUDA graphs: the sizes that vLLM captures, and what it sets aside for them before its cache.

Source: vLLM `config/vllm.py` _set_cudagraph_sizes, `v1/cudagraph_dispatcher.py` and
`v1/worker/gpu_model_runner.py` profile_cudagraph_memory, 0.23.0.
"""

from __future__ import annotations

from typing import Annotated

from memfit.constants import fitted
from memfit.serving.compressed import is_compressed
from memfit.serving.vllm.setup import Setup
from memfit.serving.weights import layers_of
from memfit.units import MIB

# vLLM captures the first two sizes of each kind and takes the second for all others. What a graph
# takes is the driver's business, and was not found in any source.
LAYER: Annotated[
    int,
    fitted(
        "bytes of one layer in one CUDA graph of vLLM",
        "`Graph capturing finished … took` over layers and graphs, the median of 17 logs of 0.8.5 "
        "to 0.19 (0.14 to 0.28 MiB), which do not count it: vllm-0024, 0029, 0036, 0048, 0049, "
        "0085, 0110 to 0112, 0114 to 0116 and 0126 to 0128, unseen-0033 and 0051; A100s, whose "
        "logs have 0.7 to 1.4 MiB, are left out",
    ),
] = int(0.22 * MIB)
BREAKABLE: Annotated[
    int,
    fitted(
        "bytes of one layer in one CUDA graph of vLLM's DeepSeek-V4, which breaks at attention",
        "`Graph capturing finished … took 1.58 GiB`, 68 graphs, 44 layers: unseen-0115",
    ),
] = int(0.54 * MIB)
SMALL, STEP, WIDE, WIDE_STEP = (1, 2, 4), 8, 256, 16


def sizes(setup: Setup) -> list[int]:
    """Tokens of the steps that are captured, in pieces between the attention layers."""
    query = 1 + setup.guesses
    most = min(setup.graphs or min(2 * query * setup.requests, 512), setup.batched)
    found = [one for one in SMALL if one <= most]
    found += range(STEP, min(most + 1, WIDE), STEP)
    found += range(WIDE, most + 1, WIDE_STEP)
    return sorted({*found, *([setup.batched] if setup.batched <= most else [])})


def captured(setup: Setup) -> int:
    """Graphs of both kinds: in pieces for all steps, and whole for those that only decode."""
    query = 1 + setup.guesses
    pieces = sizes(setup)
    decoding = {query * -(-one // query) for one in pieces}
    return len(pieces) + sum(query <= one <= query * setup.requests for one in decoding)


def graph_bytes(setup: Setup) -> int:
    """Bytes of CUDA graphs, as vLLM estimates them."""
    layers = len(layers_of(setup.rank, setup.model)) + len(setup.draft)
    each = BREAKABLE if is_compressed(setup.model) else LAYER
    return 0 if setup.eager else layers * captured(setup) * each


def counted(setup: Setup) -> bool:
    """Whether this version and runner take them from the cache; else they come on top."""
    rules = setup.rules
    return rules.counted_graphs and (not setup.second_runner or rules.second_graphs)
