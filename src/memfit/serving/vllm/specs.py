"""What each layer of a model keeps in vLLM's cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memfit.model.modules import Attention, Latent, Layer
from memfit.serving.parts import Bidirectional, Crossing, Indexer, Picking, Recurrent, pair
from memfit.serving.vllm.cache import Spec
from memfit.serving.vllm.setup import Setup
from memfit.serving.weights import kv_heads, layers_of

ALIGNED = 16  # tokens that attention's blocks are a multiple of
SPARSE_BLOCK = 64
PICKED = 128  # tokens of a block that MiniMax-M3's kernels pick (common/indexer.py)
FP8_DS_MLA = 656  # bytes of a token (kv_cache_interface.py MLAAttentionSpec)


def cached_width(kv_dtype: str, width: int) -> int:
    """Bytes of one cached number."""
    return 1 if kv_dtype.startswith("fp8") else width


def layer_specs(setup: Setup) -> list[Spec]:
    """The spec of every layer of one rank that keeps something."""
    found = []
    size = cached_width(setup.kv_dtype, setup.width)
    sparse = "index_topk" in setup.subject.config
    # platforms/cuda.py: the kernel of sparse latent attention wants blocks of 64 tokens
    block_size = SPARSE_BLOCK if sparse else setup.block
    picking = any(
        isinstance(block.mixer, Picking) for one in setup.model.layers for block in one.blocks
    )
    separate = setup.separate.layers if setup.separate is not None else ()
    for layer in (*own_layers(setup), *setup.draft, *separate):
        for block in layer.blocks:
            mixer = block.mixer
            if isinstance(mixer, Bidirectional) and setup.uncached:
                continue
            if isinstance(mixer, Attention):
                heads = kv_heads(mixer.kv_heads, setup.rank.heads)
                tokens = PICKED if picking else setup.block
                page = tokens * heads * pair(mixer) * size
                window, kind = mixer.window, "sliding" if mixer.window else "full"
                if isinstance(mixer, Crossing):
                    kind = "crossing"
                    window = setup.batched if setup.rules.crossing_steps else mixer.length
                found.append(
                    Spec(
                        kind=kind,
                        block=tokens,
                        page=page,
                        window=window,
                        heads=heads,
                        head=mixer.head,
                    )
                )
                if isinstance(mixer, Picking):  # its key stays in 16 bits beside a cache in 8
                    page = tokens * mixer.index * setup.width
                    found.append(Spec(kind="full", block=tokens, page=page, heads=1))
            elif isinstance(mixer, Recurrent):
                page, pages = state_page(setup, mixer), setup.state_pages
                found.append(Spec(kind="state", block=setup.block, page=page, states=pages))
            elif isinstance(mixer, Latent):
                token = mixer.cached * size
                # models/config.py DeepseekV32ForCausalLM: any fp8 is the kernel's own format
                if setup.kv_dtype == "fp8_ds_mla" or (size == 1 and sparse):
                    token = FP8_DS_MLA
                found.append(Spec(kind="full", block=block_size, page=block_size * token, heads=1))
            elif isinstance(mixer, Indexer):
                page = block_size * mixer.cached
                found.append(Spec(kind="full", block=block_size, page=page, heads=1))
    return aligned(found, setup) if any(one.kind == "state" for one in found) else found


def own_layers(setup: Setup) -> list[Layer]:
    """Layers of the rank, but those at the end that read the cache of earlier ones (models/
    gemma3n.py and gemma4.py kv_sharing_target_layer_name, 0.11.0 to 0.24.0)."""
    text = setup.subject.config.get("text_config")
    inner = text if isinstance(text, Mapping) else setup.subject.config
    own = len(setup.model.layers) - int(inner.get("num_kv_shared_layers") or 0)
    layers, first = layers_of(setup.rank, setup.model), setup.rank.layers[0]
    return [one for number, one in enumerate(layers, first) if number < own]


def state_page(setup: Setup, mixer: Recurrent) -> int:
    """Bytes of one request's state in one layer: in the model's numbers, unless the config or
    `mamba_ssm_cache_dtype` say that the recurrent part is in fp32. The convolution keeps a column
    more for each guessed token (mamba_utils.py gated_delta_net_state_shape)."""
    wide = 4 if "32" in setup.state_dtype else setup.width
    conv = mixer.conv + setup.guesses * (mixer.kernel - mixer.conv)
    return (conv * setup.width + mixer.state * wide) // setup.rank.heads


def aligned(specs: list[Spec], setup: Setup) -> list[Spec]:
    """Attention's blocks grow until a page holds a state, and states are padded to the page
    (models/config.py HybridAttentionMambaModelConfig)."""
    state = max(one.page for one in specs if one.kind == "state")
    token = max((one.page // one.block for one in specs if one.kind != "state"), default=0)
    if not token:
        return specs
    step = ALIGNED
    block = max(setup.block, step * -(-state // (step * token)))
    page = block * token
    each = block if setup.every_state else 0
    return [
        replace(one, page=page, block=setup.length, each=each)
        if one.kind == "state"
        else replace(one, page=block * (one.page // one.block), block=block)
        for one in specs
    ]
