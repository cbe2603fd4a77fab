"""OPT: learned positions with two extra rows; the 350M model projects a narrower embedding and puts
its norms last."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import apart, dropout, equal_heads, layer, layer_norm, plain_mlp
from memfit.model.label_heads import ANSWERS, CLASSIFIES
from memfit.model.model import Model
from memfit.model.modules import Attention, Embedding, Layer, Linear, Module

SMALL = {
    "model_type": "opt",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 256,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 64,
}
SPARE_POSITIONS = 2  # transformers 5.23 modeling_opt.py OPTLearnedPositionalEmbedding.offset


def block(fields: Fields, width: int, *, before: bool, affine: bool) -> Layer:
    """Queries are scaled in a separate multiplication before the attention kernel."""
    heads, head = equal_heads(fields, width, "num_attention_heads")
    bias, residual = (
        fields.flag("enable_bias", default=True),
        dropout(fields, "dropout", default=0.1),
    )
    mixer = Attention(
        name="self_attn",
        heads=heads,
        kv_heads=heads,
        head=head,
        style="opt",
        project=apart("self_attn", width, bias=bias),
        out=Linear(name="self_attn.out_proj", inputs=width, outputs=width, bias=bias),
        dropout=dropout(fields, "attention_dropout"),
        out_dropout=residual,
    )
    mlp = plain_mlp(
        "fc1",
        "fc2",
        width,
        fields.count("ffn_dim"),
        fields.activation("activation_function", default="relu"),
        bias=bias,
    )
    first, second = (
        layer_norm(name, width, affine=affine)
        for name in ("self_attn_layer_norm", "final_layer_norm")
    )
    return layer(
        first,
        mixer,
        second,
        replace(mlp, style="flat", dropout=residual),
        order="pre" if before else "post",
    )


@family(
    "opt",
    label_heads=(
        CLASSIFIES,
        ANSWERS,
    ),
    examples=(
        SMALL,
        {
            **SMALL,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
            "tie_word_embeddings": False,
        },
        {
            **SMALL,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "dropout": 0.0,
            "attention_dropout": 0.1,
        },
        {
            **SMALL,
            "_remove_final_layer_norm": True,
            "activation_function": "gelu",
            "word_embed_proj_dim": None,
        },
    ),
)
def build(fields: Fields) -> Model:
    """`layerdrop` skips whole layers at random in training; the step that skips none decides the
    peak, so it is not kept."""
    width, vocab, positions = (
        fields.count("hidden_size"),
        fields.count("vocab_size"),
        fields.count("max_position_embeddings"),
    )
    narrow = fields.count("word_embed_proj_dim", default=width)
    before, affine = (
        fields.flag("do_layer_norm_before", default=True),
        fields.flag("layer_norm_elementwise_affine", default=True),
    )
    dropout(fields, "layerdrop")
    embed: tuple[Module, ...] = (
        Embedding(name="model.decoder.embed_tokens", rows=vocab, width=narrow),
        Embedding(
            name="model.decoder.embed_positions",
            rows=positions + SPARE_POSITIONS,
            width=width,
            style="counted",
        ),
    )
    final: tuple[Module, ...] = ()
    if before and not fields.flag("_remove_final_layer_norm", default=False):
        final += (layer_norm("model.decoder.final_layer_norm", width, affine=affine),)
    if narrow != width:
        embed += (Linear(name="model.decoder.project_in", inputs=narrow, outputs=width),)
        final += (Linear(name="model.decoder.project_out", inputs=width, outputs=narrow),)
    return Model(
        name="opt",
        family="opt",
        prefix="model.decoder.layers",
        layers=(block(fields, width, before=before, affine=affine),) * fields.layers(),
        embed=embed,
        final=final,
        head=Linear(name="lm_head", inputs=narrow, outputs=vocab),
        tied=fields.flag("tie_word_embeddings", default=True),
        vocab=vocab,
        width=width,
        positions=positions,
        dtype=fields.dtype(),
    )
