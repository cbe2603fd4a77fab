"""ERNIE 4.5, dense: Llama with one switch for all biases, rotation in fp32 and no attention
dropout."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import SMALL, attention, decoder, dense_mlp, pre_norm
from memfit.model.model import Model
from memfit.model.modules import Attention

EXAMPLE = {key: value for key, value in SMALL.items() if key != "tie_word_embeddings"} | {
    "model_type": "ernie4_5"
}


def ernie_attention(fields: Fields, width: int, bias: bool) -> Attention:
    """Its code sets the dropout to 0, whatever the config says (modeling_ernie4_5.py)."""
    return replace(
        attention(fields, width, qkv_bias=bias, out_bias=bias, style="ernie4_5"), dropout=0.0
    )


@family(
    "ernie4_5",
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "use_bias": True,
            "tie_word_embeddings": False,
            "head_dim": 32,
            "attention_dropout": 0.1,
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=2, head_dim=128)
    width, bias = fields.count("hidden_size"), fields.flag("use_bias", default=False)
    mixer = ernie_attention(fields, width, bias)
    layers = (pre_norm(mixer, dense_mlp(fields, width, bias), width),) * fields.layers()
    return decoder(fields, "ernie4_5", layers, width=width, rotary=mixer.rotary, tied=True)
