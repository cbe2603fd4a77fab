"""Arcee AFM: Llama with a plain feed-forward, squared ReLU between."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import plain_mlp
from memfit.model.families.llama import SMALL, attention, decoder, pre_norm
from memfit.model.label_heads import ANSWERS_RENAMED, CLASSIFIES, TAGS
from memfit.model.model import Model

EXAMPLE = {**SMALL, "model_type": "arcee"}


@family(
    "arcee",
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
        },
    ),
)
def build(fields: Fields) -> Model:
    width, bias = fields.count("hidden_size"), fields.flag("attention_bias", default=False)
    fields.divides(
        fields.count("num_attention_heads"), width, "num_attention_heads", "the hidden size"
    )  # its config insists
    mixer = attention(fields, width, qkv_bias=bias, out_bias=bias)
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
    return decoder(
        fields,
        "arcee",
        (pre_norm(mixer, mlp, width),) * fields.layers(),
        width=width,
        rotary=mixer.rotary,
        tied=False,
    )
