"""BLOOM and BLOOMZ: distance biases (ALiBi) instead of positions, a norm on the embedding,
attention written out in full."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import (
    EAGER,
    dropout,
    equal_heads,
    layer,
    layer_norm,
    plain_mlp,
    without,
)
from memfit.model.label_heads import ANSWERS, CLASSIFIES, TAGS_NARROW_UNDROPPED
from memfit.model.model import Model
from memfit.model.modules import Attention, Embedding, Linear

SMALL = {"model_type": "bloom", "hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 512}


@family(
    "bloom",
    label_heads=(
        CLASSIFIES,
        TAGS_NARROW_UNDROPPED,
        ANSWERS,
    ),
    examples=(
        SMALL,
        {
            **SMALL,
            "apply_residual_connection_post_layernorm": True,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.2,
            "pretraining_tp": 4,
        },
        {**SMALL, "hidden_size": 32, "n_embed": 96, "n_head": 6, "tie_word_embeddings": False},
    ),
)
def build(fields: Fields) -> Model:
    """`bloom_gelu` is a function of its own that saves its input and recomputes the rest
    (transformers 5.23 modeling_bloom.py GeLUFunction)."""
    width, vocab = fields.count("n_embed", "hidden_size"), fields.count("vocab_size")
    heads, head = equal_heads(fields, width, "n_head", "num_attention_heads")
    if fields.count("pretraining_tp", default=1) > 1:
        without(fields, "slow_but_exact", False, "it slices its matrix multiplications")
    residual = dropout(fields, "hidden_dropout")
    mixer = Attention(
        name="self_attention",
        heads=heads,
        kv_heads=heads,
        head=head,
        style="bloom",
        kernels=EAGER,
        alibi=True,
        project=(
            Linear(
                name="self_attention.query_key_value", inputs=width, outputs=3 * width, bias=True
            ),
        ),
        out=Linear(name="self_attention.dense", inputs=width, outputs=width, bias=True),
        dropout=dropout(fields, "attention_dropout"),
        out_dropout=residual,
    )
    mlp = plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", width, 4 * width, "bloom_gelu")
    one = layer(
        layer_norm("input_layernorm", width),
        mixer,
        layer_norm("post_attention_layernorm", width),
        replace(mlp, dropout=residual),
        order="normed"
        if fields.flag("apply_residual_connection_post_layernorm", default=False)
        else "pre",
    )
    return Model(
        name="bloom",
        family="bloom",
        prefix="transformer.h",
        layers=(one,) * fields.layers("n_layer", "num_hidden_layers"),
        embed=(
            Embedding(name="transformer.word_embeddings", rows=vocab, width=width),
            layer_norm("transformer.word_embeddings_layernorm", width),
        ),
        final=(layer_norm("transformer.ln_f", width),),
        head=Linear(name="lm_head", inputs=width, outputs=vocab),
        tied=fields.flag("tie_word_embeddings", default=True),
        vocab=vocab,
        width=width,
        positions=fields.count("seq_length", default=2048),
        dtype=fields.dtype(),
    )
