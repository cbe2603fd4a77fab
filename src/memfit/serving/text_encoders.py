"""Outlines of text encoders that engines serve for embeddings, scores and labels: BERT, RoBERTa,
XLM-RoBERTa, ModernBERT, GTE, Nomic BERT.

Sizes are those of vLLM 0.24.0 `models/bert.py`, `roberta.py`, `modernbert.py` and
`bert_with_rope.py`, whose classes without a head drop the pooler of the checkpoint, and keep heads
in fp32 (`config/model.py` head_dtype).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from memfit.model.model import Model
from memfit.model.modules import MLP, Block, Embedding, Layer, Linear, Loose, Module, Weight
from memfit.serving.parts import Bidirectional, decoder, layer_norm, plain

Config = Mapping[str, object]
LABELS = 2  # of a classifier whose config says nothing (transformers PretrainedConfig.num_labels)
FLOAT = "float32"


def number(config: Config, *keys: str, default: int | None = None) -> int:
    """The first of these keys that the config has."""
    found = next((config[key] for key in keys if config.get(key) is not None), default)
    if not isinstance(found, (int, float)):
        raise KeyError(keys[0])
    return int(found)


def attention(width: int, heads: int, names: tuple[str, ...], *, bias: bool) -> Bidirectional:
    """`names` of the projections of queries, keys and values, and of the output."""
    *project, out = (Linear(name=one, inputs=width, outputs=width, bias=bias) for one in names)
    return Bidirectional(
        name=names[0].rpartition(".")[0],
        heads=heads,
        kv_heads=heads,
        head=width // heads,
        project=tuple(project),
        out=out,
    )


def after(mixer: Bidirectional | MLP, name: str, width: int) -> Block:
    """A mixer whose norm follows the sum."""
    return Block(mixer=mixer, post_norm=layer_norm(name, width), order="post")


def encoder(
    config: Config, layers: list[Layer], embed: tuple[Module, ...], final: tuple[Module, ...] = ()
) -> Model:
    """The model around its layers. It has no output head; what its class has instead is last."""
    width = number(config, "hidden_size", "n_embd")
    made = decoder({"hidden_size": width, **config}, layers)
    words = Embedding(name="embeddings.word_embeddings", rows=made.vocab, width=width)
    return replace(
        made,
        prefix="encoder.layer",
        embed=(words, *embed),
        final=(*final, *heads(config, width)),
        headless=True,
        both_ways=True,
    )


def heads(config: Config, width: int) -> tuple[Module, ...]:
    """What the class that the config names puts on top of the encoder."""
    named = config.get("architectures")
    kind = str(named[0]) if isinstance(named, list) and named else ""
    labels = config.get("id2label")
    default = len(labels) if isinstance(labels, Mapping) and labels else LABELS
    count = number(config, "num_labels", default=default)
    if kind.endswith("ForSequenceClassification"):
        return (wide("pooler.dense", width, width), wide("classifier", width, count))
    if kind.endswith("ForTokenClassification"):
        return (wide("classifier", width, count),)
    if kind in ("BertForMaskedLM", "BertSpladeSparseEmbeddingModel"):
        words = number(config, "vocab_size")
        rows = words if kind == "BertForMaskedLM" else 0  # the other's table is the embedding
        return (
            Linear(name="mlm_head.dense", inputs=width, outputs=width, bias=True),
            layer_norm("mlm_head.layer_norm", width),
            Loose(
                name="mlm_head.decoder",
                held=(
                    Weight(name="mlm_head.decoder.weight", shape=(rows, width)),
                    Weight(name="mlm_head.decoder.bias", shape=(words,)),
                ),
            ),
        )
    return ()


def wide(name: str, inputs: int, outputs: int) -> Module:
    """A linear layer in fp32."""
    return Loose(
        name=name,
        held=(
            Weight(name=f"{name}.weight", shape=(outputs, inputs), format=FLOAT),
            Weight(name=f"{name}.bias", shape=(outputs,), format=FLOAT),
        ),
    )


def bert(config: Config) -> Model:
    width, inner = number(config, "hidden_size"), number(config, "intermediate_size")
    own = "attention.self"
    names = (f"{own}.query", f"{own}.key", f"{own}.value", "attention.output.dense")
    mixer = attention(width, number(config, "num_attention_heads"), names, bias=True)
    forward = plain("mlp", "intermediate.dense", "output.dense", (width, inner), bias=True)
    one = Layer(
        blocks=(
            after(mixer, "attention.output.LayerNorm", width),
            after(forward, "output.LayerNorm", width),
        )
    )
    positions, kinds = number(config, "max_position_embeddings"), types(config, 2)
    embed = (
        Embedding(name="embeddings.position_embeddings", rows=positions, width=width),
        Embedding(name="embeddings.token_type_embeddings", rows=kinds, width=width),
        layer_norm("embeddings.LayerNorm", width),
    )
    return encoder(config, [one] * number(config, "num_hidden_layers"), embed)


def types(config: Config, default: int) -> int:
    return number(config, "type_vocab_size", default=default)


def roberta(config: Config) -> Model:
    """Positions begin behind that of the padding, so a text is as much shorter."""
    made = bert({"type_vocab_size": 1, **config})
    return replace(made, positions=made.positions - 1 - number(config, "pad_token_id", default=1))


def modernbert(config: Config) -> Model:
    """Every third layer sees all, the others a window; the first has no norm before attention."""
    width, inner = number(config, "hidden_size"), number(config, "intermediate_size")
    count, every = (
        number(config, "num_hidden_layers"),
        number(config, "global_attn_every_n_layers", default=3),
    )
    biased = bool(config.get("norm_bias"))
    names = ("attn.q", "attn.k", "attn.v", "attn.Wo")
    full = attention(
        width,
        number(config, "num_attention_heads"),
        names,
        bias=bool(config.get("attention_bias")),
    )
    full = replace(full, rotary=full.head)
    near = replace(full, window=number(config, "local_attention", default=128))
    bias = bool(config.get("mlp_bias"))
    gated = MLP(
        name="mlp",
        up=Linear(name="mlp.Wi", inputs=width, outputs=2 * inner, bias=bias),
        down=Linear(name="mlp.Wo", inputs=inner, outputs=width, bias=bias),
        fused=True,
    )

    def made(index: int) -> Layer:
        ahead = layer_norm("attn_norm", width, bias=biased) if index else None
        return Layer(
            blocks=(
                Block(norm=ahead, mixer=near if index % every else full),
                Block(norm=layer_norm("mlp_norm", width, bias=biased), mixer=gated),
            )
        )

    embed = (layer_norm("embeddings.norm", width, bias=biased),)
    final = (layer_norm("final_norm", width, bias=biased),)
    return encoder(config, [made(index) for index in range(count)], embed, final)


def rotating(config: Config, *, gate: bool, bias: bool, up_bias: bool) -> Model:
    """BERT's layers with rotated queries and keys, and a feed-forward with a gate or without."""
    width = number(config, "hidden_size", "n_embd")
    inner = number(config, "intermediate_size", "n_inner")
    heads = number(config, "num_attention_heads", "n_head")
    names = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj")
    mixer = attention(width, heads, names, bias=bias)
    mixer = replace(mixer, rotary=mixer.head)
    parts = {
        name: Linear(name=f"mlp.{name}_proj", inputs=width, outputs=inner, bias=up_bias)
        for name in ("gate", "up")
    }
    forward = MLP(
        name="mlp",
        gate=parts["gate"] if gate else None,
        up=parts["up"],
        down=Linear(name="mlp.down_proj", inputs=inner, outputs=width, bias=bias),
        style="gated" if gate else "plain",
    )
    one = Layer(blocks=(after(mixer, "attn_ln", width), after(forward, "mlp_ln", width)))
    kinds = types(config, 0)
    table = Embedding(name="embeddings.token_type_embeddings", rows=kinds, width=width)
    embed = (*((table,) if kinds else ()), layer_norm("embeddings.LayerNorm", width))
    return encoder(config, [one] * number(config, "num_hidden_layers", "n_layer"), embed)


def gte(config: Config) -> Model:
    """The gate and what it gates have no bias."""
    return rotating(config, gate=True, bias=True, up_bias=False)


def nomic(config: Config) -> Model:
    """Reads the keys of Nomic's own code or of transformers. Mixtures of experts are refused."""
    if config.get("moe_every_n_layers"):
        raise KeyError("moe_every_n_layers")
    function = str(config.get("activation_function") or config.get("hidden_act") or "silu")
    bias = bool(config.get("qkv_proj_bias"))
    common = {"max_position_embeddings": config.get("n_positions"), **config}
    return rotating(common, gate=function in ("swiglu", "silu"), bias=bias, up_bias=bias)


TEXT_ENCODERS: dict[str, Callable[[Config], Model]] = {
    "bert": bert,
    "roberta": roberta,
    "xlm-roberta": roberta,
    "modernbert": modernbert,
    "new": gte,
    "gte": gte,
    "nomic_bert": nomic,
}


def is_encoder(model: Model | None) -> bool:
    """Whether all attention of a model sees both ways, so that a request keeps nothing."""
    found = () if model is None else model.attentions
    return bool(found) and all(isinstance(one, Bidirectional) for one in found)


def in_own_numbers(model: Model) -> Model:
    """The same with heads in the model's own numbers."""
    return replace(
        model,
        final=tuple(
            replace(one, held=tuple(replace(weight, format="") for weight in one.held))
            if isinstance(one, Loose)
            else one
            for one in model.final
        ),
    )


__all__ = ["TEXT_ENCODERS", "in_own_numbers", "is_encoder"]
