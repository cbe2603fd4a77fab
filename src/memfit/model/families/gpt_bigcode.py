"""GPT-BigCode: SantaCoder, StarCoder, OctoCoder, Granite 34B Code; GPT-2 with one key/value head
for all queries."""

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
from memfit.model.label_heads import CLASSIFIES, TAGS_NARROW
from memfit.model.model import Model
from memfit.model.modules import Attention, Linear, Weight

SMALL = {
    "model_type": "gpt_bigcode",
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 512,
}


@family(
    "gpt_bigcode",
    label_heads=(
        CLASSIFIES,
        TAGS_NARROW,
    ),
    examples=(
        {**SMALL, "n_inner": 96},
        {
            **SMALL,
            "multi_query": False,
            "activation_function": "gelu",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.2,
            "attn_pdrop": 0.3,
        },
        {
            **SMALL,
            "tie_word_embeddings": False,
            "attention_softmax_in_fp32": False,
            "scale_attention_softmax_in_fp32": False,
        },
    ),
)
def build(fields: Fields) -> Model:
    """A triangle of positions × positions is kept as a buffer of the model, though nothing reads it
    any more (transformers 5.23 modeling_gpt_bigcode.py GPTBigCodeModel)."""
    width, residual = (
        fields.count("n_embd", "hidden_size"),
        dropout(fields, "resid_pdrop", default=0.1),
    )
    heads, head = equal_heads(fields, width, "n_head", "num_attention_heads")
    keys = 1 if fields.flag("multi_query", default=True) else heads
    without(
        fields, "add_cross_attention", False, "cross-attention belongs to encoder-decoder models"
    )
    mixer = Attention(
        name="attn",
        heads=heads,
        kv_heads=keys,
        head=head,
        style="gpt_bigcode",
        project=(
            Linear(name="attn.c_attn", inputs=width, outputs=(heads + 2 * keys) * head, bias=True),
        ),
        out=Linear(name="attn.c_proj", inputs=width, outputs=width, bias=True),
        dropout=dropout(fields, "attn_pdrop", default=0.1),
        out_dropout=residual,
    )
    inner, activation = (
        fields.count("n_inner", default=4 * width),
        fields.activation("activation_function", default="gelu_pytorch_tanh"),
    )
    mlp = replace(plain_mlp("mlp.c_fc", "mlp.c_proj", width, inner, activation), dropout=residual)
    one = layer(layer_norm("ln_1", width), mixer, layer_norm("ln_2", width), mlp)
    positions = fields.count("n_positions", "max_position_embeddings")
    model = frame(
        fields,
        "gpt_bigcode",
        (one,) * fields.layers("n_layer", "num_hidden_layers"),
        width=width,
        positions=positions,
        tied=True,
    )
    triangle = Weight(
        name="transformer.bias", shape=(positions, positions), role="buffer", format="bool"
    )
    return replace(
        model, embed_dropout=dropout(fields, "embd_pdrop", default=0.1), buffers=(triangle,)
    )
