"""CUDA graphs: the sizes that vLLM captures, and what it sets aside for them before its cache.

Source: vLLM `config/vllm.py` _set_cudagraph_sizes, `v1/cudagraph_dispatcher.py` and
`v1/worker/gpu_model_runner.py` profile_cudagraph_memory, 0.23.0.
"""

from __future__ import annotations

from typing import Annotated

from memfit.constants import fitted
from memfit.serving.compressed import is_compressed
from memfit.serving.speech import is_speech
from memfit.serving.vllm.experts import CUTLASS, activation, kernel, scale_bytes
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
# v1/attention/backends/flashinfer.py: a workspace (VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE) and the
# segment that the allocator makes for FlashInfer's own of 8 MiB, once steps that only decode are
# captured; and the sizes of heads that FlashInfer has
FLASHINFER_BUFFER = (394 + 20) * MIB
FLASHINFER_HEADS = (64, 128, 256)
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
    """Graphs of both kinds: in pieces for all steps, and whole for those that only decode, which
    models that pool do not have (config/vllm.py, 0.11.0 to 0.33.0)."""
    query = 1 + setup.guesses
    pieces = sizes(setup)
    speech = is_speech(setup.model)
    late = setup.rules.crossing_steps
    if setup.pooling or not decodes_in_one(setup) or (speech and not late):
        return len(pieces)
    decoding = {query * -(-one // query) for one in pieces}
    whole = sum(query <= one <= query * setup.requests for one in decoding)
    return whole if speech else len(pieces) + whole


def decodes_in_one(setup: Setup) -> bool:
    """Whether steps that only decode have graphs of the whole model: FlashInfer's kernels take one
    token a request there, but those of 10.x (get_cudagraph_support, 0.20.2)."""
    return not (setup.guesses and flashinfer_attends(setup) and (setup.sm or (0, 0))[0] != 10)


def flashinfer_attends(setup: Setup) -> bool:
    """Whether FlashInfer's attention is picked: first on 10.x, and elsewhere but on 9.0 where the
    cache is in 8 bits, or on 7.5, which FlashAttention does not support
    (platforms/cuda.py _get_backend_priorities, 0.20.2 to 0.33.0)."""
    if setup.attention not in ("", "AUTO"):
        return setup.attention == "FLASHINFER"
    sm = setup.sm
    heads = setup.model.attentions
    able = heads and all(one.head in FLASHINFER_HEADS for one in heads)
    if sm is None or sm < (7, 5) or not able or not setup.rules.flashinfer:
        return False
    if sm[0] == 10:
        return True
    eighth = setup.kv_dtype.startswith("fp8") and sm[0] != 9
    return (eighth or sm < (8, 0)) and not any(one.sinks for one in heads)


def graph_bytes(setup: Setup) -> int:
    """Bytes of CUDA graphs, as vLLM estimates them, with what the first one makes."""
    if setup.eager:
        return 0
    layers = len(layers_of(setup.rank, setup.model)) + len(setup.draft)
    each = BREAKABLE if is_compressed(setup.model) else LAYER
    return layers * captured(setup) * each + first_graph(setup)


def first_graph(setup: Setup) -> int:
    """What the first graph of a kind makes: of the kinds, the larger one's counts, as both share a
    pool (profile_cudagraph_memory, 0.23.0)."""
    decodes = decodes_in_one(setup) and not setup.pooling
    whole = FLASHINFER_BUFFER if decodes and flashinfer_attends(setup) else 0
    return max(whole, scales_in_graphs(setup))


def scales_in_graphs(setup: Setup) -> int:
    """CUTLASS' NVFP4 experts make scales for as many rows in a graph as outside."""
    return max(
        (
            scale_bytes(mixer.active, mixer.inputs)
            for mixer in setup.model.mixtures
            if kernel(mixer, setup.rank, setup.rules, activation(setup.model)) == CUTLASS
        ),
        default=0,
    )


def counted(setup: Setup) -> bool:
    """Whether this version and runner take them from the cache; else they come on top."""
    rules = setup.rules
    return rules.counted_graphs and (not setup.second_runner or rules.second_graphs)
