"""Granite 4: layers of Mamba 2 or of attention, each with a dense feed-forward, and experts
beside it or none. Models of attention alone rotate queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.model.config import Fields
from memfit.model.families._captured import TRACE, Dims, Row, captured, each, ratio, variants
from memfit.model.families._mamba_sizes import ATTENTION, DERIVED, MAMBA, mamba

DENSE = {"shared_intermediate_size": (200, 312, 184)}
EXPERTS = {
    "num_local_experts": (13, 11, 9),
    "num_experts_per_tok": (5, 3, 2),
    "intermediate_size": (64, 152, 120),
}
BASE = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 8.0,
    "max_position_embeddings": 4096,
    "position_embedding_type": "nope",
    "tie_word_embeddings": True,
}
NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
SILENT = ("logits_scaling", "position_embedding_type")


def dims(fields: Fields, *more: str) -> Dims:
    found = each(fields, *ATTENTION, *MAMBA, *DENSE, *more)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    ratio(fields, found, "hidden_size", "num_attention_heads")
    return mamba(fields, found)


def kinds(fields: Fields) -> list[str]:
    count = fields.layers()
    key = "layer_types" if fields.config.get("layer_types") else "layers_block_type"
    listed = fields.listing(key, count, ["mamba"] * count)
    return [NAMES.get(str(one), str(one)) for one in listed]


def row(name: str, more: Mapping[str, tuple[int, ...]], **changes: Any) -> Row:
    experts = bool(more)
    given = {**BASE, **changes} if experts else {**BASE, **changes, "num_local_experts": 0}
    return Row(
        name=name,
        dims=lambda fields: dims(fields, *more),
        kinds=kinds,
        examples=variants(given, {**ATTENTION, **MAMBA, **DENSE, **more}),
        active=active if experts else None,
        derived=DERIVED,
        silent=SILENT if experts else (*SILENT, "intermediate_size", "num_experts_per_tok"),
        scaled=True,
    )


def active(fields: Fields) -> tuple[int, int]:
    return fields.count("num_experts_per_tok"), fields.count("num_local_experts")


def choose(fields: Fields) -> int:
    """Experts without rotation, dense without it, dense with it."""
    rotates = fields.config.get("position_embedding_type") == "rope"
    experts = fields.count("num_local_experts", default=8, low=0) > 0
    if rotates and experts:
        message = "no captured graph of `granitemoehybrid` with experts and rotation"
        fields.blame("position_embedding_type", message, TRACE)
    return 0 if experts else 1 + rotates


captured(
    row("granitemoehybrid", EXPERTS),
    row("granitemoehybrid-dense", {}),
    row(
        "granitemoehybrid-rope",
        {},
        position_embedding_type="rope",
        layer_types=["attention"] * 3,
    ),
    choose=choose,
)
