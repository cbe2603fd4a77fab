"""Llama 1 to 3.x and what shares its code: mistral, qwen2 and granite differ in biases, windows and multipliers."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.modules import Attention, Block, Embedding, Layer, Linear, MLP, Model, Norm, Weight

SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


def heads(fields: Fields, width: int) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size), with the relations checked that transformers assumes."""
    queries = fields.count("num_attention_heads")
    keys = fields.count("num_key_value_heads", default=queries)
    fields.divides(keys, queries, "num_key_value_heads", "the query heads")
    if fields.value("head_dim", default=None) is None:
        fields.divides(queries, width, "num_attention_heads", "the hidden size")
    return queries, keys, fields.count("head_dim", default=max(1, width // queries))


def attention(fields: Fields, width: int, *, qkv_bias: bool, out_bias: bool, window: int = 0) -> Attention:
    queries, keys, head = heads(fields, width)
    project = tuple(
        Linear(name=f"self_attn.{one}_proj", inputs=width, outputs=count * head, bias=qkv_bias) for one, count in (("q", queries), ("k", keys), ("v", keys))
    )
    return Attention(
        name="self_attn", heads=queries, kv_heads=keys, head=head, project=project, rotary=head, window=window,
        out=Linear(name="self_attn.o_proj", inputs=queries * head, outputs=width, bias=out_bias),
        dropout=fields.number("attention_dropout", default=0.0),
    )  # fmt: skip


def gated_mlp(name: str, width: int, inner: int, activation: str, bias: bool = False) -> MLP:
    return MLP(
        name=name, activation=activation,
        gate=Linear(name=f"{name}.gate_proj", inputs=width, outputs=inner, bias=bias),
        up=Linear(name=f"{name}.up_proj", inputs=width, outputs=inner, bias=bias),
        down=Linear(name=f"{name}.down_proj", inputs=inner, outputs=width, bias=bias),
    )  # fmt: skip


def rotary_buffers(size: int, name: str = "model.rotary_emb") -> tuple[Weight, ...]:
    """The two tables of inverse frequencies (transformers 5.23 modeling_llama.py LlamaRotaryEmbedding), not saved with the model."""
    return tuple(Weight(name=f"{name}.{one}", shape=(size // 2,), role="buffer", format="float32") for one in ("inv_freq", "original_inv_freq"))


def decoder(fields: Fields, name: str, layers: tuple[Layer, ...], *, width: int, rotary: int, tied: bool, norm: str = "llama", scaled: bool = False) -> Model:
    """The frame that Llama's relatives share: embed_tokens, layers, norm, lm_head."""
    vocab = fields.count("vocab_size")
    return Model(
        name=name, family=name, prefix="model.layers", layers=layers, tied=tied, vocab=vocab, width=width,
        embed=(Embedding(name="model.embed_tokens", rows=vocab, width=width, scaled=scaled),),
        final=(Norm(name="model.norm", width=width, style=norm),),
        head=Linear(name="lm_head", inputs=width, outputs=vocab),
        positions=fields.count("max_position_embeddings", default=2048, high=2**40),
        dtype=fields.dtype(), buffers=rotary_buffers(rotary) if rotary else (),
    )  # fmt: skip


@family("llama", examples=(SMALL, {**SMALL, "tie_word_embeddings": True, "head_dim": 32, "attention_bias": True, "mlp_bias": True}))
def build(fields: Fields) -> Model:
    width = fields.count("hidden_size")
    bias = fields.flag("attention_bias", default=False)
    mixer = attention(fields, width, qkv_bias=bias, out_bias=bias)
    mlp = gated_mlp("mlp", width, fields.count("intermediate_size"), fields.text("hidden_act", default="silu"), fields.flag("mlp_bias", default=False))
    layer = Layer(
        blocks=(
            Block(norm=Norm(name="input_layernorm", width=width), mixer=mixer),
            Block(norm=Norm(name="post_attention_layernorm", width=width), mixer=mlp),
        )
    )
    tied = fields.flag("tie_word_embeddings", default=False)
    return decoder(fields, "llama", (layer,) * fields.layers(), width=width, rotary=mixer.head, tied=tied)
