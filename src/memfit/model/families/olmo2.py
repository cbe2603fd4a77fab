"""OLMo 2: norms after attention and feed-forward instead of before, and over the whole of queries
and keys."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import SMALL, attention, decoder, dense_mlp, normed, post_norm
from memfit.model.label_heads import CLASSIFIES
from memfit.model.model import Model
from memfit.model.modules import Attention

EXAMPLE = {**SMALL, "model_type": "olmo2"}


def olmo2_attention(fields: Fields, width: int, window: int = 0) -> Attention:
    bias = fields.flag("attention_bias", default=False)
    return normed(
        attention(fields, width, qkv_bias=bias, out_bias=bias, window=window, style="olmo2"),
        whole=True,
        style="olmo2",
    )


@family(
    "olmo2",
    label_heads=(CLASSIFIES,),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "num_key_value_heads": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "attention_dropout": 0.1,
        },
    ),
)
def build(fields: Fields) -> Model:
    width = fields.count("hidden_size")
    mixer = olmo2_attention(fields, width)
    layers = (post_norm(mixer, dense_mlp(fields, width), width, "olmo2"),) * fields.layers()
    return decoder(
        fields, "olmo2", layers, width=width, rotary=mixer.rotary, tied=False, norm="olmo2"
    )
