"""BioGPT: learned positions with two extra rows, a scaled embedding, a head called
`output_projection`."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import apart, dropout, equal_heads, layer, layer_norm, plain_mlp
from memfit.model.label_heads import CLASSIFIES, TAGS_NARROW
from memfit.model.model import Model
from memfit.model.modules import Attention, Embedding, Linear

SMALL = {
    "model_type": "biogpt",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
SPARE_POSITIONS = 2  # transformers 5.23 modeling_biogpt.py BioGptLearnedPositionalEmbedding.offset


@family(
    "biogpt",
    label_heads=(
        CLASSIFIES,
        TAGS_NARROW,
    ),
    examples=(
        SMALL,
        {
            **SMALL,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "activation_dropout": 0.1,
            "hidden_act": "relu",
        },
        {**SMALL, "scale_embedding": False, "tie_word_embeddings": False},
    ),
)
def build(fields: Fields) -> Model:
    """The embedding is multiplied even where `scale_embedding` is false, then by 1."""
    width, vocab, positions = (
        fields.count("hidden_size"),
        fields.count("vocab_size"),
        fields.count("max_position_embeddings"),
    )
    heads, head = equal_heads(fields, width, "num_attention_heads")
    residual = dropout(fields, "hidden_dropout_prob", default=0.1)
    dropout(fields, "layerdrop")  # the step that skips no layer decides the peak
    mixer = Attention(
        name="self_attn",
        heads=heads,
        kv_heads=heads,
        head=head,
        style="biogpt",
        project=apart("self_attn", width, bias=True),
        out=Linear(name="self_attn.out_proj", inputs=width, outputs=width, bias=True),
        dropout=dropout(fields, "attention_probs_dropout_prob", default=0.1),
        out_dropout=residual,
    )
    mlp = plain_mlp(
        "fc1",
        "fc2",
        width,
        fields.count("intermediate_size"),
        fields.activation("hidden_act", default="gelu"),
    )
    mlp = replace(mlp, inner_dropout=dropout(fields, "activation_dropout"), dropout=residual)
    one = layer(
        layer_norm("self_attn_layer_norm", width), mixer, layer_norm("final_layer_norm", width), mlp
    )
    return Model(
        name="biogpt",
        family="biogpt",
        prefix="biogpt.layers",
        layers=(one,) * fields.layers(),
        embed=(
            Embedding(name="biogpt.embed_tokens", rows=vocab, width=width, scaled=True),
            Embedding(
                name="biogpt.embed_positions",
                rows=positions + SPARE_POSITIONS,
                width=width,
                style="beside_mask",
            ),
        ),
        final=(layer_norm("biogpt.layer_norm", width),),
        head=Linear(name="output_projection", inputs=width, outputs=vocab),
        tied=fields.flag("tie_word_embeddings", default=True),
        vocab=vocab,
        width=width,
        positions=positions,
        dtype=fields.dtype(),
        embed_dropout=residual,
    )
