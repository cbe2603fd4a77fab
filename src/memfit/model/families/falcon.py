"""Falcon: 7B (one key/value head), 40B, 11B and 180B (groups of heads, their own norms), and the RW
models (ALiBi, biases, in sequence)."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import dropout, equal_heads, layer, layer_norm, plain_mlp
from memfit.model.families.llama import rotary_buffers
from memfit.model.label_heads import ANSWERS, CLASSIFIES, TAGS_NARROW_UNDROPPED
from memfit.model.model import Model
from memfit.model.modules import Attention, Embedding, Layer, Linear

SMALL = {
    "model_type": "falcon",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
NEW = {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2}


def key_heads(fields: Fields, heads: int, new: bool) -> int:
    """The new architecture groups its heads; the old one has one key/value head or all of them."""
    if not new and fields.flag("multi_query", default=True):
        return 1
    given = fields.count("num_kv_heads", default=heads)
    fields.divides(given, heads, "num_kv_heads", "the query heads")
    if not new and given != heads:
        fields.blame(
            "num_kv_heads",
            f"{given} key/value heads for {heads} query heads need `new_decoder_architecture`",
        )
    return given


def attention(fields: Fields, width: int, *, new: bool, parallel: bool) -> Attention:
    """Rotary layers drop nothing out of their scores (but inside flash-attn, which keeps no mask),
    and the new architecture repeats keys and values before it caches them (transformers 5.23
    modeling_falcon.py FalconAttention); the dropout behind the output is there in sequential layers
    only."""
    heads, head = equal_heads(fields, width, "num_attention_heads")
    keys = key_heads(fields, heads, new)
    alibi, bias = fields.flag("alibi", default=False), fields.flag("bias", default=False)
    if not alibi and head % 2:
        fields.blame(
            "num_attention_heads",
            f"{head} rotated values must be an even number",
            of=(head,),
        )
    scores = dropout(fields, "attention_dropout")
    return Attention(
        name="self_attention",
        heads=heads,
        kv_heads=keys,
        head=head,
        style="falcon_alibi" if alibi else "falcon",
        alibi=alibi,
        expanded=new,
        project=(
            Linear(
                name="self_attention.query_key_value",
                inputs=width,
                outputs=(heads + 2 * keys) * head,
                bias=bias,
                own_class=True,
            ),
        ),
        out=Linear(
            name="self_attention.dense", inputs=width, outputs=width, bias=bias, own_class=True
        ),
        rotary=0 if alibi else head,
        dropout=scores if alibi else 0.0,
        out_dropout=0.0 if parallel else scores,
    )


def block(fields: Fields, width: int) -> Layer:
    """Side by side, one dropout follows the sum of both results; it is the feed-forward's. `falcon`
    linears add their bias apart."""
    new, parallel = (
        fields.flag("new_decoder_architecture", default=False),
        fields.flag("parallel_attn", default=True),
    )
    norms = fields.count("num_ln_in_parallel_attn", default=2 if new else 1, low=1, high=2)
    if new and not parallel:
        fields.blame("parallel_attn", "`new_decoder_architecture` needs `parallel_attn`")
    elif norms == 2 and parallel and not new:
        fields.blame(
            "num_ln_in_parallel_attn",
            "two norms in a parallel layer need `new_decoder_architecture`",
        )
    mixer = attention(fields, width, new=new, parallel=parallel)
    inner, activation = (
        fields.count("ffn_hidden_size", default=4 * width),
        fields.activation("activation", default="gelu"),
    )
    mlp = plain_mlp(
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
        width,
        inner,
        activation,
        bias=fields.flag("bias", default=False),
    )
    up, down = replace(mlp.up, own_class=True), replace(mlp.down, own_class=True)
    mlp = replace(mlp, style="falcon", up=up, down=down, dropout=dropout(fields, "hidden_dropout"))
    names = ("input_layernorm", "input_layernorm" if parallel else "post_attention_layernorm")
    if parallel and norms == 2:
        names = ("ln_attn", "ln_mlp")
    return layer(
        layer_norm(names[0], width), mixer, layer_norm(names[1], width), mlp, parallel=parallel
    )


@family(
    "falcon",
    label_heads=(
        CLASSIFIES,
        TAGS_NARROW_UNDROPPED,
        ANSWERS,
    ),
    examples=(
        SMALL,
        {**NEW, "hidden_dropout": 0.1, "attention_dropout": 0.2},
        {
            **NEW,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 96,
            "bias": True,
            "tie_word_embeddings": False,
        },
        {
            **SMALL,
            "alibi": True,
            "bias": True,
            "multi_query": False,
            "parallel_attn": False,
            "attention_dropout": 0.1,
            "hidden_dropout": 0.2,
        },
        {**SMALL, "hidden_size": 32, "n_embed": 96, "multi_query": False, "activation": "relu"},
        {**SMALL, "alibi": True, "attention_dropout": 0.1, "hidden_dropout": 0.2},
        {**SMALL, "parallel_attn": False, "attention_dropout": 0.1, "hidden_dropout": 0.2},
    ),
)
def build(fields: Fields) -> Model:
    """The rotary tables are built with ALiBi too."""
    width, vocab = fields.count("n_embed", "hidden_size"), fields.count("vocab_size")
    one = block(fields, width)
    mixer = one.blocks[0].mixer
    return Model(
        name="falcon",
        family="falcon",
        prefix="transformer.h",
        layers=(one,) * fields.layers(),
        embed=(Embedding(name="transformer.word_embeddings", rows=vocab, width=width),),
        final=(layer_norm("transformer.ln_f", width),),
        head=Linear(name="lm_head", inputs=width, outputs=vocab),
        tied=fields.flag("tie_word_embeddings", default=True),
        vocab=vocab,
        width=width,
        positions=fields.count("max_position_embeddings", default=2048, high=2**40),
        dtype=fields.dtype(),
        buffers=rotary_buffers(mixer.head, "transformer.rotary_emb")
        if isinstance(mixer, Attention)
        else (),
    )
