"""Mixtures of experts: a function a style, made of a router, the stacked experts and what runs for
every token."""

from __future__ import annotations

from memfit.lower.styles import Styles

MOES = Styles(
    __name__,
    {
        "mixtral": "mixtures.routed",
        "qwen2_moe": "mixtures.qwen2_moe",
        "qwen3_moe": "mixtures.routed",
        "granitemoe": "mixtures.routed",
        "gpt_oss": "mixtures.routed",
        "minimax_m2": "mixtures.routed",
        "deepseek_v2": "mixtures.deepseek",
        "deepseek_v3": "mixtures.deepseek",
        "ernie4_5_moe": "mixtures.ernie4_5_moe",
        "phimoe": "mixtures.routed",
    },
)
