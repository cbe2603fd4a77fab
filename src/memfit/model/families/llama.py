"""Llama 1 to 3.x, and the pieces that its relatives share: heads, rotary tables, projections,
norms, windows, the frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from memfit.model.config import LARGEST_HEADS, Fields, shown
from memfit.model.families import family
from memfit.model.families._parts import dropout
from memfit.model.label_heads import ANSWERS_RENAMED, CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Block, Embedding, Layer, Linear, MoE, Norm, Weight

K = TypeVar("K")
SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def heads(fields: Fields, width: int) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size), with the relations checked that transformers
    assumes."""
    queries = fields.count("num_attention_heads", high=LARGEST_HEADS)
    keys = fields.count("num_key_value_heads", default=queries, high=LARGEST_HEADS)
    fields.divides(keys, queries, "num_key_value_heads", "the query heads")
    if fields.value("head_dim", default=None) is None:
        fields.divides(queries, width, "num_attention_heads", "the hidden size")
    return queries, keys, fields.count("head_dim", default=max(1, width // queries))


def attention(
    fields: Fields,
    width: int,
    *,
    qkv_bias: bool,
    out_bias: bool,
    window: int = 0,
    rotary: int | None = None,
    style: str = "llama",
    repeated_until: tuple[int, int] = (0, 0),
) -> Attention:
    queries, keys, head = heads(fields, width)
    if head % 2 and rotary != 0:
        fields.blame(
            "head_dim",
            f"{head} rotated values must be an even number",
            of=(head, width, queries),
        )
    project = tuple(
        Linear(name=f"self_attn.{one}_proj", inputs=width, outputs=count * head, bias=qkv_bias)
        for one, count in (("q", queries), ("k", keys), ("v", keys))
    )
    return Attention(
        name="self_attn",
        heads=queries,
        kv_heads=keys,
        head=head,
        project=project,
        rotary=head if rotary is None else rotary,
        window=window,
        out=Linear(name="self_attn.o_proj", inputs=queries * head, outputs=width, bias=out_bias),
        dropout=dropout(fields, "attention_dropout"),
        style=style,
        repeated_until=repeated_until,
    )


def normed(mixer: Attention, *, whole: bool = False, style: str = "llama") -> Attention:
    """With norms on queries and keys: one for every head, or over the `whole` projection."""
    wide = (mixer.heads, mixer.kv_heads) if whole else (1, 1)
    q, k = (
        Norm(name=f"self_attn.{one}_norm", width=count * mixer.head, style=style)
        for one, count in zip("qk", wide, strict=True)
    )
    return replace(mixer, q_norm=q, k_norm=k)


def gated_mlp(name: str, width: int, inner: int, activation: str, bias: bool = False) -> MLP:
    return MLP(
        name=name,
        activation=activation,
        gate=Linear(name=f"{name}.gate_proj", inputs=width, outputs=inner, bias=bias),
        up=Linear(name=f"{name}.up_proj", inputs=width, outputs=inner, bias=bias),
        down=Linear(name=f"{name}.down_proj", inputs=inner, outputs=width, bias=bias),
    )


def fused_mlp(width: int, inner: int, activation: str) -> MLP:
    """Gate and up in one matrix (phi-3, GLM)."""
    up = Linear(name="mlp.gate_up_proj", inputs=width, outputs=2 * inner)
    return MLP(
        name="mlp",
        activation=activation,
        fused=True,
        style="fused",
        up=up,
        down=Linear(name="mlp.down_proj", inputs=inner, outputs=width),
    )


def dense_mlp(fields: Fields, width: int, bias: bool = False) -> MLP:
    """The gated feed-forward under the names that most configs use."""
    return gated_mlp(
        "mlp",
        width,
        fields.count("intermediate_size"),
        fields.activation("hidden_act", default="silu"),
        bias,
    )


def pre_norm(
    mixer: Attention,
    second: MLP | MoE,
    width: int,
    norm: str = "llama",
    *,
    bias: bool = False,
    scaled: bool = False,
) -> Layer:
    """Llama's layer: a norm before each of the two."""
    first, then = (
        Norm(name=name, width=width, style=norm, bias=bias)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    return Layer(
        blocks=(
            Block(norm=first, mixer=mixer, scaled=scaled),
            Block(norm=then, mixer=second, scaled=scaled),
        )
    )


def post_norm(mixer: Attention, second: MLP | MoE, width: int, norm: str = "llama") -> Layer:
    """OLMo 2's layer: a norm after each of the two."""
    first, then = (
        Norm(name=name, width=width, style=norm)
        for name in ("post_attention_layernorm", "post_feedforward_layernorm")
    )
    return Layer(blocks=(Block(mixer=mixer, post_norm=first), Block(mixer=second, post_norm=then)))


def layer_types(fields: Fields, default: Iterable[bool], key: str = "layer_types") -> list[bool]:
    """For each layer, whether it slides: from the list in the config, or `default`."""
    listed = fields.config.get(key)
    count = fields.layers()
    if listed is None:
        return list(default)
    known = {
        "full_attention": False,
        "attention": False,
        "sliding_attention": True,
    }  # `attention` is the old name of the first
    if not isinstance(listed, list) or len(listed) != count:
        fields.blame(key, f"`{key}` needs {count} entries, one per layer", of=(count,))
    elif unknown := [item for item in listed if not isinstance(item, str) or item not in known]:
        fields.blame(
            key,
            f"unknown layer type `{shown(unknown[0])}`",
            "known: " + ", ".join(f"`{one}`" for one in known),
        )
    else:
        return [known[item] for item in listed]
    return [False] * count


def masks(window: int, types: Iterable[bool], *, always: bool = False) -> tuple[int | None, ...]:
    """A full mask and, for layers that slide (or `always`), one of the window, without which
    transformers' code stops."""
    return (0, window or None) if always or any(types) else (0,)


def stack(kinds: Iterable[K], make: Callable[[K], Layer]) -> tuple[Layer, ...]:
    """One layer for each of `kinds`; kinds that turn out equal share one value."""
    kinds, known = list(kinds), dict[Layer, Layer]()
    made = {
        kind: known.setdefault(layer, layer)
        for kind, layer in ((kind, make(kind)) for kind in dict.fromkeys(kinds))
    }
    return tuple(made[kind] for kind in kinds)


def both_kinds(fields: Fields, *keys: str, read: Callable[[bool], object]) -> None:
    """Where the layers, or the `keys` that tell dense ones from those with experts, are wrong: read
    both kinds, so that all problems show."""
    if fields.doubts("num_hidden_layers", *keys):
        read(True)
        read(False)


def rotary_buffers(
    size: int, name: str = "model.rotary_emb", types: Iterable[bool] | None = None
) -> tuple[Weight, ...]:
    """The tables of inverse frequencies, not saved with the model (transformers 5.23
    modeling_llama.py LlamaRotaryEmbedding); given `types`, a pair for each type of layer that
    occurs (modeling_gemma3.py Gemma3RotaryEmbedding)."""
    prefixes = (
        [""]
        if types is None
        else sorted({"sliding_attention_" if slides else "full_attention_" for slides in types})
    )
    shape = ((size + 1) // 2,)
    names = (
        f"{name}.{prefix}{one}" for prefix in prefixes for one in ("inv_freq", "original_inv_freq")
    )
    return tuple(Weight(name=one, shape=shape, role="buffer", format="float32") for one in names)


def decoder(
    fields: Fields,
    name: str,
    layers: tuple[Layer, ...],
    *,
    width: int,
    rotary: int,
    tied: bool,
    norm: str = "llama",
    scaled: bool = False,
) -> Model:
    """The frame that Llama's relatives share: embed_tokens, layers, norm, lm_head. `tied`: where
    the config does not say."""
    vocab = fields.count("vocab_size")
    return Model(
        name=name,
        family=name,
        prefix="model.layers",
        layers=layers,
        tied=fields.flag("tie_word_embeddings", default=tied),
        vocab=vocab,
        width=width,
        embed=(Embedding(name="model.embed_tokens", rows=vocab, width=width, scaled=scaled),),
        final=(Norm(name="model.norm", width=width, style=norm),),
        head=Linear(name="lm_head", inputs=width, outputs=vocab),
        positions=fields.count("max_position_embeddings", default=2048, high=2**40),
        dtype=fields.dtype(),
        buffers=rotary_buffers(rotary) if rotary else (),
    )


@family(
    "llama",
    label_heads=(
        CLASSIFIES,
        TAGS,
        ANSWERS_RENAMED,
    ),
    examples=(
        SMALL,
        {
            **SMALL,
            "tie_word_embeddings": True,
            "head_dim": 32,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
)
def build(fields: Fields) -> Model:
    width = fields.count("hidden_size")
    bias = fields.flag("attention_bias", default=False)
    mixer = attention(fields, width, qkv_bias=bias, out_bias=bias)
    layer = pre_norm(mixer, dense_mlp(fields, width, fields.flag("mlp_bias", default=False)), width)
    return decoder(
        fields, "llama", (layer,) * fields.layers(), width=width, rotary=mixer.head, tied=False
    )
