"""MiniMax: layers of lightning attention, a block of tokens at a time, and of attention, each with
a mixture of experts."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants
from memfit.model.label_heads import ANSWERS, CLASSIFIES, TAGS

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 160, 336),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 14),
    "num_key_value_heads": (2, 5, 7),
    "head_dim": (40, 88, 56),
    "num_local_experts": (13, 11, 9),
    "num_experts_per_tok": (5, 3, 2),
}
BASE = {
    "model_type": "minimax",
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "linear_attention"],
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
FACTORS = tuple(
    f"{layer}_{one}_factor"
    for layer in ("full_attn", "linear_attn", "mlp")
    for one in ("alpha", "beta")
)


def dims(fields: Fields) -> Dims:
    fields.assume(block_size=256, num_local_experts=8, num_experts_per_tok=2)
    if fields.config.get("head_dim") is None:
        heads = fields.count("num_attention_heads", default=32)
        fields.assume(head_dim=fields.count("hidden_size", default=4096) // heads)
    found = each(fields, *SIZES)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    return found


def kinds(fields: Fields) -> list[str]:
    count = fields.layers()
    usual = [("full_attention", "linear_attention")[number % 2] for number in range(count)]
    return [str(one) for one in fields.listing("layer_types", count, usual)]


captured(
    Row(
        name="minimax",
        label_heads=(CLASSIFIES, TAGS, ANSWERS),
        dims=dims,
        kinds=kinds,
        examples=variants(BASE, {**SIZES, "block_size": (536, 616, 664)}),
        active=lambda fields: (
            fields.count("num_experts_per_tok"),
            fields.count("num_local_experts"),
        ),
        silent=FACTORS,
        absent=("sliding_window",),
        sizes=((3, 188), (7, 250), (11, 427)),
        window="block_size",
        beyond={
            "blocks": ("seq", "window"),
            "later_blocks": ("seq + -1*window", "window"),
            "last_block": ("seq + window + -1*blocks*window", "1"),
        },
    )
)
