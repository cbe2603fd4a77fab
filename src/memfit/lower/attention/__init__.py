"""Attention as each family's code runs it: one function a style, one file a lineage of code."""

from __future__ import annotations

from memfit.lower.styles import Styles

# The styles whose kernel is transformers' common one; `llama.styles` makes them.
COMMON = (
    "cohere",
    "ernie4_5",
    "gemma3",
    "glm",
    "glm4_moe",
    "helium",
    "hunyuan_v1_dense",
    "llama",
    "minimax_m2",
    "ministral3",
    "nemotron",
    "olmo",
    "olmo2",
    "olmoe",
    "phi",
    "phi3",
    "qwen3",
    "stablelm",
)
# The module of a function is an Attention or a Latent, as the style says.
ATTENTION = Styles(
    __name__,
    {
        "biogpt": "opt.biogpt",
        "bloom": "alibi.bloom",
        "codegen": "gpt_neo.codegen",
        "deepseek_v2": "latent.deepseek_v2",
        "deepseek_v3": "latent.deepseek_v3",
        "falcon": "falcon.falcon",
        "falcon_alibi": "falcon.falcon_alibi",
        "gemma2": "capped.gemma2",
        "gpt2": "gpt2.gpt2",
        "gpt2_upcast": "gpt2.gpt2_upcast",
        "gpt_bigcode": "gpt2.gpt_bigcode",
        "gpt_neo": "gpt_neo.gpt_neo",
        "gpt_neox": "gpt_neox.gpt_neox",
        "gpt_oss": "capped.gpt_oss",
        "gptj": "gpt_neo.gptj",
        "mpt": "alibi.mpt",
        "opt": "opt.opt",
        "persimmon": "gpt_neox.persimmon",
        "qwen": "qwen.qwen",
        "xglm": "opt.xglm",
        **dict.fromkeys(COMMON, "llama.STYLES"),
    },
)
# What all layers share beside masks and rotary tables, made once a pass.
SHARED = Styles(
    __name__,
    {
        "bloom": "alibi.bloom_distances",
        "falcon": "falcon.falcon_mask",
        "falcon_alibi": "falcon.falcon_distances",
        "mpt": "alibi.mpt_distances",
        "qwen": "qwen.make_mask",
    },
)
