"""Gemma 4 12B: Gemma 4's language model without experts, without embeddings of each layer and
without shared keys. Patches and sounds are projected, with no tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.model.config import Fields
from memfit.model.families import gemma4
from memfit.model.families._captured import TRACE, Dims, Row, captured
from memfit.model.families._gemma4_towers import unified_patches, unified_sounds
from memfit.model.families.gemma4_unified_text import UNREAD, WINDOW
from memfit.model.modules import Weight

PARTS = {
    "model_type": "gemma4_unified",
    "vision_config": {
        "model_type": "gemma4_unified_vision",
        "mm_embed_dim": 40,
        "mm_posemb_size": 24,
        "output_proj_dims": 40,
    },
    "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 48},
}
PLACES = ("model.embed_vision.", "model.embed_audio.")


def dims(fields: Fields) -> Dims:
    if not fields.config.keys() - {"model_type"}:  # no config of a model
        fields.count("hidden_size")
        fields.count("vocab_size")
    else:
        fields.assume(sliding_window=WINDOW)
        fields.config = {**fields.config, **UNREAD}
    if fields.config.get("num_kv_shared_layers"):
        fields.blame("num_kv_shared_layers", "no captured graph with layers that share keys", TRACE)
    return gemma4.dims(fields)


def tower(fields: Fields) -> tuple[Weight, ...]:
    text = fields.section("text_config")
    width = text.count("hidden_size", default=gemma4.DEFAULTS["hidden_size"])
    found: tuple[Weight, ...] = ()
    for key, build in (("vision_config", unified_patches), ("audio_config", unified_sounds)):
        if fields.config.get(key) is not None:
            found += build(fields.section(key), width)
    return found


def unified(row: Row) -> Row:
    """The same layers in this class."""
    return replace(
        row,
        name=row.name.replace("gemma4", "gemma4_unified"),
        examples=tuple(PARTS | {"text_config": text_of(one)} for one in row.examples),
        dims=dims,
        tower=tower,
        idle=PLACES,
        last=(
            f"{PLACES[0]}multimodal_embedder.embedding_projection",
            f"{PLACES[1]}embedding_projection",
        ),
    )


def text_of(example: Mapping[str, Any]) -> dict[str, Any]:
    text = {key: value for key, value in example["text_config"].items() if key not in UNREAD}
    return text | {"model_type": "gemma4_unified_text"}


def choose(fields: Fields) -> int:
    """Layers that see all have several keys, or one."""
    return int(fields.mapping("text_config").get("num_global_key_value_heads") == 1)


captured(*(unified(gemma4.ROWS[at]) for at in (0, 4)), choose=choose)
