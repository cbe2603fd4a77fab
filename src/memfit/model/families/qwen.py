"""Qwen of 2023, 1.8B to 72B (`QWenLMHeadModel`): its code came with the checkpoints
(modeling_qwen.py of Qwen/Qwen-7B, December 2023, the same file in Qwen/Qwen-72B), and transformers
never had it. One projection with a bias for queries, keys and values; feed-forwards half as wide as
the config says."""

from __future__ import annotations

from memfit.model.config import LARGEST_HEADS, Fields
from memfit.model.families import family
from memfit.model.families._parts import dropout, layer, without
from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Embedding, Linear, Norm, Weight

SMALL = {
    "model_type": "qwen",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "vocab_size": 512,
    "seq_length": 64,
    "max_position_embeddings": 128,
}
FACTORS = 32767  # of attention to more than `seq_length` tokens, one for each position


def width_of(fields: Fields) -> int:
    return fields.count("hidden_size", "n_embd")


def attention(fields: Fields) -> Attention:
    """QWenAttention: its heads share the hidden size. A mask's value and the factors of long texts
    are buffers of every layer."""
    width = width_of(fields)
    heads = fields.count("num_attention_heads", "n_head", high=LARGEST_HEADS)
    head = fields.count("kv_channels", default=128)
    if heads * head != width and not fields.doubts("kv_channels"):
        fields.blame(
            "kv_channels",
            (f"{heads} heads of {head} values do not equal `hidden_size` {width}"),
            of=(heads, head, width),
        )
    if head % 2:
        fields.blame("kv_channels", f"{head} rotated values must be an even number", of=(head,))
    without(fields, "rotary_pct", 1.0, "partial rotary embeddings are not supported")
    without(fields, "use_cache_quantization", False, "its 8-bit KV cache is not supported")
    return Attention(
        name="attn",
        heads=heads,
        kv_heads=heads,
        head=head,
        rotary=head,
        style="qwen",
        project=(Linear(name="attn.c_attn", inputs=width, outputs=3 * heads * head, bias=True),),
        out=Linear(
            name="attn.c_proj",
            inputs=width,
            outputs=heads * head,
            bias=not fields.flag("no_bias", default=True),
        ),
        dropout=dropout(fields, "attn_dropout_prob", "attn_pdrop"),
        buffers=(
            Weight(name="attn.masked_bias", shape=(), role="buffer"),
            Weight(name="attn.logn_tensor", shape=(1, FACTORS, 1, 1), role="buffer"),
        ),
    )


def feed_forward(fields: Fields) -> MLP:
    """QWenMLP: c_proj(w1(x) · silu(w2(x)))."""
    width, twice = width_of(fields), fields.count("intermediate_size", "ffn_hidden_size", low=2)
    if twice % 2:
        fields.blame("intermediate_size", f"{twice} must be even", of=(twice,))
    inner, bias = max(1, twice // 2), not fields.flag("no_bias", default=True)
    return MLP(
        name="mlp",
        style="qwen",
        gate=Linear(name="mlp.w2", inputs=width, outputs=inner, bias=bias),
        up=Linear(name="mlp.w1", inputs=width, outputs=inner, bias=bias),
        down=Linear(name="mlp.c_proj", inputs=inner, outputs=width, bias=bias),
    )


def stored_as(fields: Fields) -> str:
    """Where the config asks for none of its three formats, the code takes bf16."""
    asked = [
        long
        for short, long in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"))
        if fields.flag(short, default=False)
    ]
    if len(asked) > 1:
        fields.blame("bf16", "only one of `bf16`, `fp16` and `fp32` can be true")
    fields.assume(torch_dtype=asked[0] if asked else "bfloat16")
    return fields.dtype()


@family(
    "qwen",
    brought=True,
    examples=(
        SMALL,
        {
            **SMALL,
            "no_bias": False,
            "fp16": True,
            "emb_dropout_prob": 0.1,
            "attn_dropout_prob": 0.1,
        },
    ),
)
def build(fields: Fields) -> Model:
    width, vocab, mixer = width_of(fields), fields.count("vocab_size"), attention(fields)
    first, second, last = (
        Norm(name=name, width=width) for name in ("ln_1", "ln_2", "transformer.ln_f")
    )
    one = layer(first, mixer, second, feed_forward(fields))
    without(fields, "tie_word_embeddings", False, "this family does not tie them")
    return Model(
        name="qwen",
        family="qwen",
        prefix="transformer.h",
        layers=(one,) * fields.layers("num_hidden_layers", "n_layer"),
        tied=False,
        vocab=vocab,
        width=width,
        embed=(Embedding(name="transformer.wte", rows=vocab, width=width),),
        final=(last,),
        head=Linear(name="lm_head", inputs=width, outputs=vocab),
        embed_dropout=dropout(fields, "emb_dropout_prob", "embd_pdrop"),
        positions=fields.count(
            "max_position_embeddings", "n_positions", "seq_length", default=8192, high=2**40
        ),
        dtype=stored_as(fields),
        buffers=(
            Weight(
                name="transformer.rotary_emb.inv_freq",
                shape=(mixer.head // 2,),
                role="buffer",
                format="float32",
            ),
        ),
    )
