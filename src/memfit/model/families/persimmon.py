"""Persimmon: one fused projection laid out head by head, LayerNorms on queries and keys, half of
each head rotated."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import dropout, equal_heads, layer, layer_norm, plain_mlp, rotated
from memfit.model.families.llama import rotary_buffers
from memfit.model.label_heads import CLASSIFIES, TAGS_UNDROPPED
from memfit.model.model import Model
from memfit.model.modules import Attention, Embedding, Linear, Norm

SMALL = {
    "model_type": "persimmon",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}


@family(
    "persimmon",
    label_heads=(
        CLASSIFIES,
        TAGS_UNDROPPED,
    ),
    examples=(
        SMALL,
        {
            **SMALL,
            "qk_layernorm": False,
            "partial_rotary_factor": 1.0,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
        },
        {
            **SMALL,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
)
def build(fields: Fields) -> Model:
    """`hidden_dropout` follows the feed-forward only (transformers 5.23 modeling_persimmon.py
    PersimmonDecoderLayer)."""
    width, vocab = fields.count("hidden_size"), fields.count("vocab_size")
    heads, head = equal_heads(fields, width, "num_attention_heads")
    norms: tuple[Norm | None, ...] = (None, None)
    if fields.flag("qk_layernorm", default=True):
        norms = tuple(layer_norm(f"self_attn.{one}_layernorm", head) for one in "qk")
    mixer = Attention(
        name="self_attn",
        heads=heads,
        kv_heads=heads,
        head=head,
        style="persimmon",
        project=(
            Linear(name="self_attn.query_key_value", inputs=width, outputs=3 * width, bias=True),
        ),
        out=Linear(name="self_attn.dense", inputs=width, outputs=width, bias=True),
        q_norm=norms[0],
        k_norm=norms[1],
        rotary=rotated(fields, head, "partial_rotary_factor", default=0.5),
        dropout=dropout(fields, "attention_dropout"),
    )
    inner, activation = (
        fields.count("intermediate_size"),
        fields.activation("hidden_act", default="relu2"),
    )
    mlp = replace(
        plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", width, inner, activation),
        dropout=dropout(fields, "hidden_dropout"),
    )
    one = layer(
        layer_norm("input_layernorm", width),
        mixer,
        layer_norm("post_attention_layernorm", width),
        mlp,
    )
    return Model(
        name="persimmon",
        family="persimmon",
        prefix="model.layers",
        layers=(one,) * fields.layers(),
        embed=(Embedding(name="model.embed_tokens", rows=vocab, width=width),),
        final=(layer_norm("model.final_layernorm", width),),
        head=Linear(name="lm_head", inputs=width, outputs=vocab),
        tied=fields.flag("tie_word_embeddings", default=False),
        vocab=vocab,
        width=width,
        positions=fields.count("max_position_embeddings", default=16384, high=2**40),
        dtype=fields.dtype(),
        buffers=rotary_buffers(mixer.rotary),
    )
