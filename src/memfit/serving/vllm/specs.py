"""What each layer of a model keeps in vLLM's cache."""

from __future__ import annotations

from memfit.model.modules import Attention, Latent
from memfit.serving.vllm.cache import Spec
from memfit.serving.vllm.setup import Setup
from memfit.serving.weights import kv_heads

FP8_DS_MLA = 656  # bytes of a token (kv_cache_interface.py MLAAttentionSpec)


def cached_width(kv_dtype: str, width: int) -> int:
    """Bytes of one cached number."""
    return 1 if kv_dtype.startswith("fp8") else width


def layer_specs(setup: Setup) -> list[Spec]:
    """The spec of every layer of one rank that keeps something."""
    found = []
    size = cached_width(setup.kv_dtype, setup.width)
    for layer in setup.model.layers[setup.rank.layers[0] : setup.rank.layers[1]]:
        for block in layer.blocks:
            mixer = block.mixer
            if isinstance(mixer, Attention):
                heads = kv_heads(mixer.kv_heads, setup.rank.heads)
                page = 2 * setup.block * heads * mixer.head * size
                kind = "sliding" if mixer.window else "full"
                found.append(
                    Spec(
                        kind=kind,
                        block=setup.block,
                        page=page,
                        window=mixer.window,
                        heads=heads,
                        head=mixer.head,
                    )
                )
            elif isinstance(mixer, Latent):
                token = mixer.cached * size
                if setup.kv_dtype == "fp8_ds_mla":
                    token = FP8_DS_MLA
                found.append(
                    Spec(kind="full", block=setup.block, page=setup.block * token, heads=1)
                )
    return found
