"""Attention as each family's code runs it: one function a style, one file a lineage of code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memfit.lower.attention import (
    alibi,
    capped,
    falcon,
    gpt2,
    gpt_neo,
    gpt_neox,
    latent,
    llama,
    opt,
    qwen,
)
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.tensors import Tensor
from memfit.model.modules import Attention, Model

Program = Callable[
    [Tensor, Any, Bound, Context], Tensor
]  # the module is Attention or Latent, as the style says
ATTENTION: dict[str, Program] = {
    "biogpt": opt.biogpt,
    "bloom": alibi.bloom,
    "codegen": gpt_neo.codegen,
    "falcon": falcon.falcon,
    "falcon_alibi": falcon.falcon_alibi,
    "gpt2": gpt2.gpt2,
    "gpt2_upcast": gpt2.gpt2_upcast,
    "gpt_bigcode": gpt2.gpt_bigcode,
    "gpt_neo": gpt_neo.gpt_neo,
    "gpt_neox": gpt_neox.gpt_neox,
    "gptj": gpt_neo.gptj,
    "mpt": alibi.mpt,
    "opt": opt.opt,
    "persimmon": gpt_neox.persimmon,
    "qwen": qwen.qwen,
    "xglm": opt.xglm,
    **llama.styles(),
    **latent.LATENT,
    **capped.STYLES,
}
# What all layers share beside masks and rotary tables, made once a pass.
Shared = Callable[[Attention, Model, Context], None]
SHARED: dict[str, Shared] = {
    "bloom": alibi.bloom_distances,
    "falcon": falcon.falcon_mask,
    "falcon_alibi": falcon.falcon_distances,
    "mpt": alibi.mpt_distances,
    "qwen": qwen.make_mask,
}
