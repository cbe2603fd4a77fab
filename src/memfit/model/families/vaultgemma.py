"""VaultGemma: Gemma 2 with norms before attention and MLP alone."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.gemma import sandwich
from memfit.model.families.gemma2 import EXAMPLE as GEMMA2
from memfit.model.families.gemma2 import gemma2_model
from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Layer

EXAMPLE = {**GEMMA2, "model_type": "vaultgemma"}


@family(
    "vaultgemma",
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "sliding_window": 64,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        {
            **EXAMPLE,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
            "attention_dropout": 0.1,
        },
    ),
)
def build(fields: Fields) -> Model:
    return gemma2_model(fields, "vaultgemma", before_both)


def before_both(mixer: Attention, mlp: MLP, width: int) -> Layer:
    first, second = sandwich(mixer, mlp, width).blocks
    return Layer(blocks=(replace(first, post_norm=None), replace(second, post_norm=None)))
