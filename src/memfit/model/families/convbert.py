"""ConvBERT: half of each layer's attention is a convolution over the words around; the small one
has embeddings narrower than its layers."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, each, ratio, variants
from memfit.model.families._chains import ChainRow, chained
from memfit.model.families.bert import BASE, RATES, SILENT, kinds

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (192, 480, 288),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 12),
    "max_position_embeddings": (164, 178, 194),
    "type_vocab_size": (4, 8, 2),
    "conv_kernel_size": (9, 5, 7),
}
NARROW = {"embedding_size": (72, 136, 232)}
DEFAULTS = {
    "type_vocab_size": 2,
    "max_position_embeddings": 512,
    "embedding_size": 768,
    "conv_kernel_size": 9,
}
RATIO = 2  # of heads, half of which are left where convolutions take the other half


def width(fields: Fields) -> int:
    return fields.count("embedding_size", default=DEFAULTS["embedding_size"])


def narrow(fields: Fields) -> int:
    return int(width(fields) != fields.count("hidden_size"))


def dims(fields: Fields) -> Dims:
    found = each(fields, *SIZES)
    ratio(fields, found, "hidden_size", "num_attention_heads")
    fields.divides(RATIO, found["num_attention_heads"], "head_ratio", "`num_attention_heads`")
    found["attention_heads"] = found["num_attention_heads"] // RATIO
    if narrow(fields):
        found["embedding_size"] = width(fields)
    return found


def row(name: str, **sizes: tuple[int, ...]) -> ChainRow:
    return ChainRow(
        name=name,
        dims=dims,
        kinds=kinds,
        examples=variants({**BASE, "model_type": "convbert"}, {**SIZES, **sizes}),
        heads=SILENT,
        rates=RATES,
        defaults=DEFAULTS,
    )


chained(
    row("convbert", embedding_size=SIZES["hidden_size"]),
    row("convbert-narrow", **NARROW),
    choose=narrow,
)
