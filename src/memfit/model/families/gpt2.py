"""GPT-2 and what runs its code (DistilGPT2, Cerebras-GPT): learned positions, one fused projection
kept as (in, out)."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import (
    dropout,
    equal_heads,
    frame,
    layer,
    layer_norm,
    plain_mlp,
    without,
)
from memfit.model.label_heads import ANSWERS, CLASSIFIES, TAGS_NARROW
from memfit.model.model import Model
from memfit.model.modules import Attention, Linear

SMALL = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 512,
}


def attention(fields: Fields, width: int) -> Attention:
    """`reorder_and_upcast_attn` has a path of its own in eager attention only: scores in fp32 by
    baddbmm."""
    heads, head = equal_heads(fields, width, "n_head", "num_attention_heads")
    upcast = fields.flag("reorder_and_upcast_attn", default=False)
    return Attention(
        name="attn",
        heads=heads,
        kv_heads=heads,
        head=head,
        style="gpt2_upcast" if upcast else "gpt2",
        project=(
            Linear(name="attn.c_attn", inputs=width, outputs=3 * width, bias=True, conv1d=True),
        ),
        out=Linear(name="attn.c_proj", inputs=width, outputs=width, bias=True, conv1d=True),
        dropout=dropout(fields, "attn_pdrop", default=0.1),
        out_dropout=dropout(fields, "resid_pdrop", default=0.1),
    )


@family(
    "gpt2",
    "gpt-sw3",
    label_heads=(
        CLASSIFIES,
        TAGS_NARROW,
        ANSWERS,
    ),
    examples=(
        SMALL,
        {**SMALL, "model_type": "gpt-sw3"},
        {
            **SMALL,
            "n_inner": 96,
            "activation_function": "gelu",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.2,
            "attn_pdrop": 0.0,
            "n_ctx": 128,
        },
        {
            **SMALL,
            "tie_word_embeddings": False,
            "reorder_and_upcast_attn": True,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
)
def build(fields: Fields) -> Model:
    width = fields.count("n_embd", "hidden_size")
    inner = fields.count("n_inner", default=4 * width)
    without(
        fields, "add_cross_attention", False, "cross-attention belongs to encoder-decoder models"
    )
    mixer = attention(fields, width)
    mlp = plain_mlp(
        "mlp.c_fc",
        "mlp.c_proj",
        width,
        inner,
        fields.activation("activation_function", default="gelu_new"),
        conv1d=True,
    )
    one = layer(
        layer_norm("ln_1", width),
        mixer,
        layer_norm("ln_2", width),
        replace(mlp, dropout=mixer.out_dropout),
    )
    layers = (one,) * fields.layers("n_layer", "num_hidden_layers")
    positions = fields.count("n_positions", "max_position_embeddings")
    return replace(
        frame(fields, "gpt2", layers, width=width, positions=positions, tied=True),
        embed_dropout=dropout(fields, "embd_pdrop", default=0.1),
    )
