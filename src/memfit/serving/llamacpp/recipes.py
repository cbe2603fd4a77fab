"""How the graph of each architecture differs from Llama's: a row each.

Read from src/models/ and load_hparams of llama.cpp (b11549, b7437). What a file's tensors already
say (biases, norms of queries and keys, experts, fused projections) is not repeated here.
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.lazy_dataclass import dataclass

RMS, LAYER = "rms_norm", "norm"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """`gating`, `normed`, `scaled`: how experts are chosen and weighted."""

    norm: str = RMS
    act: str = "silu"
    gating: str = "softmax"
    normed: bool = True
    scaled: bool = False
    parallel: bool = False  # attention and feed-forward read the same input
    scales_embedding: bool = False
    scales_query: bool = False
    rope: bool = True
    softcap: bool = False
    window_inputs: bool = False  # a cache of its own for layers that see a window
    layers: str = "decoder"  # the function that builds its layers
    gated_attention: bool = False
    flash: bool = True  # False: its scores need more than the fused kernel does
    expands_input: bool = False
    sparse: int = 0  # first layers whose feed-forward keeps the largest activations alone

    @property
    def encodes(self) -> bool:
        """A batch goes through whole, and nothing is generated."""
        return self.layers in ("encoder", "modern_encoder")


LIKE_LLAMA = """
llama qwen2 qwen3 qwen2vl qwen3vl mistral3 mistral4 internlm2 arcee seed_oss smollm3 ernie4_5
hunyuan-dense exaone xverse deci qwen olmo2 exaone4 granite minicpm baichuan olmo apertus
"""
RECIPES: Mapping[str, Recipe] = {
    **{name: Recipe() for name in LIKE_LLAMA.split()},
    "gemma": Recipe(scales_embedding=True, scales_query=True),
    "gemma2": Recipe(scales_embedding=True, scales_query=True, softcap=True),
    "gemma3": Recipe(scales_embedding=True, scales_query=True),
    "gemma3n": Recipe(layers="gemma3n", sparse=10),  # `n_layer_sparsity`
    "gemma4": Recipe(layers="gemma4", scales_embedding=True),
    "bert": Recipe(layers="encoder", norm=LAYER, act="gelu", rope=False),
    "nomic-bert": Recipe(layers="encoder", norm=LAYER),
    "modern-bert": Recipe(layers="modern_encoder", norm=LAYER, act="fused"),
    "t5": Recipe(layers="encoder_decoder"),
    "phi2": Recipe(norm=LAYER, parallel=True, scales_query=True, act="gelu"),
    "phi3": Recipe(act="fused", scales_query=True),
    "glm4": Recipe(act="fused"),
    "chatglm": Recipe(act="fused"),
    "starcoder2": Recipe(norm=LAYER, act="gelu"),
    "nemotron": Recipe(norm=LAYER, act="relu_sqr"),
    "jais2": Recipe(norm=LAYER, act="relu_sqr"),
    "stablelm": Recipe(norm=LAYER),
    "command-r": Recipe(norm=LAYER, parallel=True),
    "cohere2": Recipe(norm=LAYER, parallel=True),
    "gpt2": Recipe(norm=LAYER, act="gelu", rope=False),
    "starcoder": Recipe(norm=LAYER, act="gelu", rope=False),
    "gptneox": Recipe(norm=LAYER, act="gelu", parallel=True),
    "bloom": Recipe(norm=LAYER, act="gelu", rope=False),
    "mpt": Recipe(norm=LAYER, act="gelu", rope=False),
    "falcon": Recipe(norm=LAYER, act="gelu", parallel=True),
    "phimoe": Recipe(norm=LAYER, scales_query=True),
    "qwen2moe": Recipe(normed=False),
    "qwen3moe": Recipe(),
    "qwen3vlmoe": Recipe(),
    "olmoe": Recipe(normed=False),
    "granitemoe": Recipe(),
    "deepseek": Recipe(normed=False),
    "dots1": Recipe(gating="sigmoid", scaled=True),
    "glm4moe": Recipe(gating="sigmoid", scaled=True),
    "step35": Recipe(gating="sigmoid", scaled=True),
    "mimo2": Recipe(gating="sigmoid"),
    "minimax-m2": Recipe(gating="sigmoid"),
    "ernie4_5-moe": Recipe(gating="softmax"),
    "hunyuan-moe": Recipe(),
    "dbrx": Recipe(norm=LAYER),
    "grok": Recipe(act="gelu", softcap=True, flash=False),
    "gpt-oss": Recipe(gating="softmax_weight", normed=False),
    "llama4": Recipe(gating="sigmoid", normed=False),
    "mamba": Recipe(layers="single"),
    "mamba2": Recipe(layers="single"),
    "nemotron_h": Recipe(layers="single", act="relu_sqr", rope=False, expands_input=True),
    "nemotron_h_moe": Recipe(
        layers="single",
        act="relu_sqr",
        rope=False,
        gating="sigmoid",
        scaled=True,
        expands_input=True,
    ),
    "granitehybrid": Recipe(layers="hybrid"),
    "jamba": Recipe(layers="hybrid", rope=False, normed=False),
    "lfm2": Recipe(layers="hybrid"),
    "qwen3next": Recipe(layers="hybrid", gated_attention=True),
    "qwen35": Recipe(layers="hybrid", gated_attention=True),
    "qwen35moe": Recipe(layers="hybrid", gated_attention=True),
    "deepseek2": Recipe(layers="latent", scaled=True),
    "deepseek32": Recipe(layers="latent", gating="sigmoid", scaled=True),
    "glm-dsa": Recipe(layers="latent", gating="sigmoid", scaled=True),
}
