"""MPT: ALiBi over the longest sequence, no biases anywhere, attention written out in full."""

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
from memfit.model.label_heads import ANSWERS, CLASSIFIES, TAGS_NARROW
from memfit.model.model import Model
from memfit.model.modules import Attention, Embedding, Linear

SMALL = {
    "model_type": "mpt",
    "d_model": 64,
    "n_layers": 3,
    "n_heads": 4,
    "max_seq_len": 128,
    "vocab_size": 512,
}


@family(
    "mpt",
    label_heads=(
        CLASSIFIES,
        TAGS_NARROW,
        ANSWERS,
    ),
    examples=(
        SMALL,
        {
            **SMALL,
            "attn_config": {"clip_qkv": 6.0, "alibi": True, "softmax_scale": 0.1},
            "tie_word_embeddings": False,
            "n_heads": 6,
            "d_model": 96,
        },
        {
            **SMALL,
            "attn_config": {"attn_pdrop": 1, "alibi_bias_max": 16},
            "resid_pdrop": 0.1,
            "emb_pdrop": 0.2,
        },
    ),
)
def build(fields: Fields) -> Model:
    """Only `attn_pdrop` acts, in three places; `resid_pdrop` and `emb_pdrop` are read by nobody
    (transformers 5.23 modeling_mpt.py). What the original code has and transformers' has not would
    load the wrong weights, so it is refused."""
    width, vocab = fields.count("d_model", "hidden_size"), fields.count("vocab_size")
    heads, head = equal_heads(fields, width, "n_heads", "num_attention_heads")
    options = fields.section("attn_config")
    for where, key, expected in (
        (fields, "expansion_ratio", 4),
        (fields, "no_bias", True),
        (options, "attn_type", "multihead_attention"),
        (options, "qk_ln", False),
        (options, "alibi", True),
    ):
        without(where, key, expected, f"transformers' MPT supports only {expected}")
    drop = dropout(options, "attn_pdrop")
    mixer = Attention(
        name="attn",
        heads=heads,
        kv_heads=heads,
        head=head,
        style="mpt",
        kernels=EAGER,
        alibi=True,
        clipped=bool(options.number("clip_qkv", default=0.0)),
        dropout=drop,
        out_dropout=drop,
        project=(Linear(name="attn.Wqkv", inputs=width, outputs=3 * width),),
        out=Linear(name="attn.out_proj", inputs=width, outputs=width),
    )
    mlp = replace(
        plain_mlp("ffn.up_proj", "ffn.down_proj", width, 4 * width, "gelu", bias=False),
        dropout=drop,
    )
    one = layer(
        layer_norm("norm_1", width, bias=False), mixer, layer_norm("norm_2", width, bias=False), mlp
    )
    return Model(
        name="mpt",
        family="mpt",
        prefix="transformer.blocks",
        layers=(one,) * fields.layers("n_layers", "num_hidden_layers"),
        embed=(Embedding(name="transformer.wte", rows=vocab, width=width),),
        final=(layer_norm("transformer.norm_f", width, bias=False),),
        head=Linear(name="lm_head", inputs=width, outputs=vocab),
        tied=fields.flag("tie_word_embeddings", default=True),
        vocab=vocab,
        width=width,
        positions=fields.count("max_seq_len", default=2048),
        dtype=fields.dtype(),
    )
