"""GPT-Neo: every second layer looks back 256 tokens only, by a mask that each layer keeps as a
buffer of positions × positions."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields, shown
from memfit.model.families import family
from memfit.model.families._parts import (
    EAGER_OR_FLASH,
    apart,
    dropout,
    equal_heads,
    frame,
    layer,
    layer_norm,
    plain_mlp,
)
from memfit.model.label_heads import ANSWERS, CLASSIFIES, TAGS_NARROW
from memfit.model.model import Model
from memfit.model.modules import Attention, Layer, Linear, Weight

SMALL = {
    "model_type": "gpt_neo",
    "hidden_size": 64,
    "num_layers": 4,
    "num_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 512,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 16,
}


def _described(item: object) -> bool:
    match item:
        case [[*names], int(repeats)] if names and repeats >= 0 and not isinstance(repeats, bool):
            return all(name in ("global", "local") for name in names)
    return False


def kinds(fields: Fields, layers: int) -> list[str]:
    """`global` or `local` for each layer, from `[[[kind, …], repeats], …]`."""
    found: list[str] = []
    listing = fields.value("attention_types", default=[[["global", "local"], 12]])
    for item in listing if isinstance(listing, (list, tuple)) else [listing]:
        if not _described(item):
            fields.blame(
                "attention_types",
                f"`{shown(item)}` must be [[kind, …], repeats]",
                "kinds are `global` and `local`",
            )
            return ["global"] * layers
        found += list(item[0])[: layers + 1] * min(
            item[1], layers + 1
        )  # long enough to show that it is too long
    if len(found) != layers and not any(
        problem.where.endswith((".num_layers", ".num_hidden_layers")) for problem in fields.problems
    ):
        fields.blame(
            "attention_types",
            (
                "`attention_types` describes "
                f"{'more' if len(found) > layers else len(found)} layers, the model has "
                f"{layers}"
            ),
        )
    return (found + ["global"] * layers)[:layers]


@family(
    "gpt_neo",
    label_heads=(
        CLASSIFIES,
        TAGS_NARROW,
        ANSWERS,
    ),
    examples=(
        SMALL,
        {
            **SMALL,
            "attention_types": [[["global"], 1], [["local", "local", "global"], 1]],
            "intermediate_size": 96,
            "activation_function": "relu",
        },
        {
            **SMALL,
            "tie_word_embeddings": False,
            "resid_dropout": 0.1,
            "embed_dropout": 0.2,
            "attention_dropout": 0.3,
        },
    ),
)
def build(fields: Fields) -> Model:
    """The scores are computed in fp32 and in full for local layers too; the cache keeps every token
    (transformers 5.23 modeling_gpt_neo.py GPTNeoSelfAttention), so the window saves no memory
    there."""
    width, positions = fields.count("hidden_size"), fields.count("max_position_embeddings")
    heads, head = equal_heads(fields, width, "num_heads", "num_attention_heads")
    residual = dropout(fields, "resid_dropout")
    mixer = Attention(
        name="attn.attention",
        heads=heads,
        kv_heads=heads,
        head=head,
        style="gpt_neo",
        kernels=EAGER_OR_FLASH,
        project=apart("attn.attention", width, bias=False),
        out=Linear(name="attn.attention.out_proj", inputs=width, outputs=width, bias=True),
        dropout=dropout(fields, "attention_dropout"),
        out_dropout=residual,
        buffers=(
            Weight(
                name="attn.attention.bias",
                shape=(1, 1, positions, positions),
                role="buffer",
                format="bool",
            ),
        ),
    )
    inner = fields.count("intermediate_size", default=4 * width)
    mlp = replace(
        plain_mlp(
            "mlp.c_fc",
            "mlp.c_proj",
            width,
            inner,
            fields.activation("activation_function", default="gelu_new"),
        ),
        dropout=residual,
    )
    window = fields.count("window_size", default=256)

    def one(kind: str) -> Layer:
        local = replace(mixer, window=window if kind == "local" else 0)
        return layer(layer_norm("ln_1", width), local, layer_norm("ln_2", width), mlp)

    known = {kind: one(kind) for kind in ("global", "local")}
    layers = tuple(
        known[kind] for kind in kinds(fields, fields.layers("num_layers", "num_hidden_layers"))
    )
    return replace(
        frame(fields, "gpt_neo", layers, width=width, positions=positions, tied=True),
        embed_dropout=dropout(fields, "embed_dropout"),
    )
