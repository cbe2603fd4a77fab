"""Nemotron 4 and Minitron: LayerNorms around 1, squared ReLU, half of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import layer, layer_norm, plain_mlp, rotated
from memfit.model.families.llama import SMALL, attention, decoder
from memfit.model.label_heads import ANSWERS_RENAMED, CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import Norm

EXAMPLE = {**SMALL, "model_type": "nemotron"}


def norm(name: str, width: int) -> Norm:
    return layer_norm(name, width, style="layer1p")


@family(
    "nemotron",
    label_heads=(
        CLASSIFIES,
        TAGS,
        ANSWERS_RENAMED,
    ),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 32,
            "partial_rotary_factor": 1.0,
        },
        {**EXAMPLE, "num_key_value_heads": 4, "attention_dropout": 0.1},
    ),
)
def build(fields: Fields) -> Model:
    fields.count("num_key_value_heads")  # transformers 5.23 has no default for it
    width, bias = fields.count("hidden_size"), fields.flag("attention_bias", default=False)
    mixer = attention(fields, width, qkv_bias=bias, out_bias=bias, style="nemotron")
    mixer = replace(mixer, rotary=rotated(fields, mixer.head, "partial_rotary_factor", default=0.5))
    activation, inner = (
        fields.activation("hidden_act", default="relu2"),
        fields.count("intermediate_size"),
    )
    mlp = plain_mlp(
        "mlp.up_proj",
        "mlp.down_proj",
        width,
        inner,
        activation,
        bias=fields.flag("mlp_bias", default=False),
    )
    one = layer(norm("input_layernorm", width), mixer, norm("post_attention_layernorm", width), mlp)
    model = decoder(
        fields, "nemotron", (one,) * fields.layers(), width=width, rotary=mixer.rotary, tied=False
    )
    return replace(model, final=(norm("model.norm", width),))
