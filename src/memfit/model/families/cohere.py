"""Command R: attention and feed-forward side by side behind one norm; Command R+ has a norm for
every head."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import layer
from memfit.model.families.llama import SMALL, attention, decoder, dense_mlp
from memfit.model.model import Model
from memfit.model.modules import Attention, Layer, Norm

EXAMPLE = {key: value for key, value in SMALL.items() if key != "tie_word_embeddings"} | {
    "model_type": "cohere"
}


def side_by_side(fields: Fields, mixer: Attention, width: int) -> Layer:
    norm = Norm(name="input_layernorm", width=width, style="cohere")
    return layer(norm, mixer, norm, dense_mlp(fields, width), parallel=True)


@family(
    "cohere",
    examples=(
        EXAMPLE,
        {**EXAMPLE, "use_qk_norm": True, "num_key_value_heads": None, "attention_dropout": 0.1},
        {
            **EXAMPLE,
            "use_qk_norm": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "logit_scale": 0.25,
        },
    ),
)
def build(fields: Fields) -> Model:
    width, bias = fields.count("hidden_size"), fields.flag("attention_bias", default=False)
    mixer = attention(fields, width, qkv_bias=bias, out_bias=bias, style="cohere")
    if fields.flag("use_qk_norm", default=False):
        q, k = (
            Norm(name=f"self_attn.{one}_norm", width=mixer.head, heads=count, style="cohere")
            for one, count in (("q", mixer.heads), ("k", mixer.kv_heads))
        )
        mixer = replace(mixer, q_norm=q, k_norm=k)
    layers = (side_by_side(fields, mixer, width),) * fields.layers()
    return replace(
        decoder(
            fields, "cohere", layers, width=width, rotary=mixer.rotary, tied=True, norm="cohere"
        ),
        logit_scale=True,
    )
