"""GPT-NeoX, Pythia, RedPajama, Dolly: attention and feed-forward side by side, a quarter of each
head rotated."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import dropout, equal_heads, layer, layer_norm, plain_mlp, rotated
from memfit.model.families.llama import rotary_buffers
from memfit.model.label_heads import ANSWERS, CLASSIFIES, TAGS_NEOX
from memfit.model.model import Model
from memfit.model.modules import Attention, Embedding, Linear

SMALL = {
    "model_type": "gpt_neox",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}


def attention(fields: Fields, width: int, hidden_dropout: float) -> Attention:
    """One projection, laid out head by head as (q, k, v)."""
    heads, head = equal_heads(fields, width, "num_attention_heads")
    bias = fields.flag("attention_bias", default=True)
    return Attention(
        name="attention",
        heads=heads,
        kv_heads=heads,
        head=head,
        style="gpt_neox",
        project=(
            Linear(name="attention.query_key_value", inputs=width, outputs=3 * width, bias=bias),
        ),
        out=Linear(name="attention.dense", inputs=width, outputs=width, bias=bias),
        rotary=rotated(fields, head, "rotary_pct", default=0.25),
        dropout=dropout(fields, "attention_dropout"),
        out_dropout=hidden_dropout,
    )


@family(
    "gpt_neox",
    label_heads=(
        CLASSIFIES,
        TAGS_NEOX,
        ANSWERS,
    ),
    examples=(
        {**SMALL, "tie_word_embeddings": False},
        {
            **SMALL,
            "use_parallel_residual": False,
            "rotary_pct": 1.0,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "hidden_act": "gelu_fast",
        },
        {
            **SMALL,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.2,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
        },
    ),
)
def build(fields: Fields) -> Model:
    width, vocab = fields.count("hidden_size"), fields.count("vocab_size")
    hidden_dropout = dropout(fields, "hidden_dropout")
    mixer = attention(fields, width, hidden_dropout)
    activation = fields.activation("hidden_act", default="gelu")
    mlp = plain_mlp(
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
        width,
        fields.count("intermediate_size"),
        activation,
    )
    one = layer(
        layer_norm("input_layernorm", width),
        mixer,
        layer_norm("post_attention_layernorm", width),
        replace(mlp, dropout=hidden_dropout),
        parallel=fields.flag("use_parallel_residual", default=True),
    )
    return Model(
        name="gpt_neox",
        family="gpt_neox",
        prefix="gpt_neox.layers",
        layers=(one,) * fields.layers(),
        embed=(Embedding(name="gpt_neox.embed_in", rows=vocab, width=width),),
        final=(layer_norm("gpt_neox.final_layer_norm", width),),
        head=Linear(name="lm_head", inputs=width, outputs=vocab),
        tied=fields.flag("tie_word_embeddings", default=False),
        vocab=vocab,
        width=width,
        positions=fields.count("max_position_embeddings", default=2048, high=2**40),
        dtype=fields.dtype(),
        embed_dropout=hidden_dropout,
        buffers=rotary_buffers(mixer.rotary, "gpt_neox.rotary_emb"),
    )
