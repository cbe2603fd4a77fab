"""XGLM: positions from a table of sines that is a buffer, a scaled embedding, attention written out
in full."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import (
    EAGER,
    apart,
    dropout,
    equal_heads,
    layer,
    layer_norm,
    plain_mlp,
    without,
)
from memfit.model.model import Model
from memfit.model.modules import Attention, Embedding, Linear

SMALL = {
    "model_type": "xglm",
    "d_model": 64,
    "num_layers": 3,
    "attention_heads": 4,
    "ffn_dim": 256,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
SPARE_POSITIONS = 2  # transformers 5.23 modeling_xglm.py XGLMSinusoidalPositionalEmbedding.offset


@family(
    "xglm",
    examples=(
        SMALL,
        {
            **SMALL,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.1,
            "activation_function": "relu",
            "layerdrop": 0.1,
        },
        {**SMALL, "scale_embedding": False, "tie_word_embeddings": False},
    ),
)
def build(fields: Fields) -> Model:
    """Only fp16 scores are cast up for the softmax; a padded batch costs two more tensors of that
    size (XGLMAttention.forward)."""
    width, vocab, positions = (
        fields.count("d_model", "hidden_size"),
        fields.count("vocab_size"),
        fields.count("max_position_embeddings"),
    )
    heads, head = equal_heads(fields, width, "attention_heads", "num_attention_heads")
    without(
        fields, "add_cross_attention", False, "cross-attention belongs to encoder-decoder models"
    )
    residual = dropout(fields, "dropout", default=0.1)
    dropout(fields, "layerdrop")  # the step that skips no layer decides the peak
    mixer = Attention(
        name="self_attn",
        heads=heads,
        kv_heads=heads,
        head=head,
        style="xglm",
        kernels=EAGER,
        project=apart("self_attn", width, bias=True),
        out=Linear(name="self_attn.out_proj", inputs=width, outputs=width, bias=True),
        dropout=dropout(fields, "attention_dropout", default=0.1),
        out_dropout=residual,
    )
    mlp = plain_mlp(
        "fc1",
        "fc2",
        width,
        fields.count("ffn_dim"),
        fields.activation("activation_function", default="gelu"),
    )
    mlp = replace(
        mlp, style="nested", inner_dropout=dropout(fields, "activation_dropout"), dropout=residual
    )
    one = layer(
        layer_norm("self_attn_layer_norm", width), mixer, layer_norm("final_layer_norm", width), mlp
    )
    return Model(
        name="xglm",
        family="xglm",
        prefix="model.layers",
        layers=(one,) * fields.layers("num_layers", "num_hidden_layers"),
        embed=(
            Embedding(name="model.embed_tokens", rows=vocab, width=width, scaled=True),
            Embedding(
                name="model.embed_positions",
                rows=positions + SPARE_POSITIONS,
                width=width,
                style="sinusoidal",
            ),
        ),
        final=(layer_norm("model.layer_norm", width),),
        head=Linear(name="lm_head", inputs=width, outputs=vocab),
        tied=fields.flag("tie_word_embeddings", default=True),
        vocab=vocab,
        width=width,
        positions=positions,
        dtype=fields.dtype(),
        embed_dropout=residual,
    )
