"""Attention as each family's code runs it: one function a style, one file a lineage of code."""

from __future__ import annotations

from collections.abc import Callable

from memfit.lower.attention import capped, gpt2, latent, llama
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.recorder import Tensor
from memfit.model.modules import Attention, Model

Program = Callable[[Tensor, Attention, Bound, Context], Tensor]
ATTENTION: dict[str, Program] = {
    "gpt2": gpt2.gpt2, "gpt2_upcast": gpt2.gpt2_upcast, "gpt_bigcode": gpt2.gpt_bigcode, **llama.styles(), **latent.LATENT, **capped.STYLES,
}  # fmt: skip
# What all layers share beside masks and rotary tables, made once a pass.
Shared = Callable[[Attention, Model, Context], None]
SHARED: dict[str, Shared] = {}
