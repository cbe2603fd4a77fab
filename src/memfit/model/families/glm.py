"""GLM-4 9B: biases on queries, keys and values, half of each head rotated in pairs, gate and up in
one matrix."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import rotated
from memfit.model.families.llama import SMALL, attention, decoder, fused_mlp, pre_norm
from memfit.model.label_heads import CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Block, Layer, Norm

EXAMPLE = {**SMALL, "model_type": "glm", "head_dim": 16, "pad_token_id": 0}
EXAMPLE_4 = {**SMALL, "model_type": "glm4", "head_dim": 16, "pad_token_id": 0}


def parts(fields: Fields, width: int) -> tuple[Attention, MLP]:
    fields.assume(num_key_value_heads=2, head_dim=128)
    mixer = attention(
        fields,
        width,
        qkv_bias=fields.flag("attention_bias", default=True),
        out_bias=False,
        style="glm",
    )
    mlp = fused_mlp(
        width, fields.count("intermediate_size"), fields.activation("hidden_act", default="silu")
    )
    return replace(
        mixer, rotary=rotated(fields, mixer.head, "partial_rotary_factor", default=0.5)
    ), mlp


@family(
    "glm",
    label_heads=(
        CLASSIFIES,
        TAGS,
    ),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "head_dim": 32,
            "partial_rotary_factor": 0.25,
        },
    ),
)
def build(fields: Fields) -> Model:
    width = fields.count("hidden_size")
    mixer, mlp = parts(fields, width)
    return decoder(
        fields,
        "glm",
        (pre_norm(mixer, mlp, width),) * fields.layers(),
        width=width,
        rotary=mixer.rotary,
        tied=False,
    )


@family(
    "glm4",
    label_heads=(
        CLASSIFIES,
        TAGS,
    ),
    examples=(
        EXAMPLE_4,
        {
            **EXAMPLE_4,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "head_dim": 32,
            "attention_dropout": 0.1,
        },
    ),
)
def build_glm4(fields: Fields) -> Model:
    """GLM-4-0414: norms on both sides of each block."""
    width = fields.count("hidden_size")
    mixer, mlp = parts(fields, width)

    def norm(name: str) -> Norm:
        return Norm(name=f"{name}_layernorm", width=width)

    first = Block(norm=norm("input"), mixer=mixer, post_norm=norm("post_self_attn"))
    layer = Layer(
        blocks=(first, Block(norm=norm("post_attention"), mixer=mlp, post_norm=norm("post_mlp")))
    )
    return decoder(
        fields, "glm4", (layer,) * fields.layers(), width=width, rotary=mixer.rotary, tied=False
    )
