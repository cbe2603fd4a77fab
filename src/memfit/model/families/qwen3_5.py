"""Qwen3.5 and 3.6 with their vision tower, as transformers loads them: the text model is computed,
the tower only takes memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.model.config import Fields
from memfit.model.families._captured import Row, captured
from memfit.model.families._composite import text_of
from memfit.model.families._towers import qwen3_tower
from memfit.model.families.qwen3_5_text import ROW
from memfit.model.label_heads import CLASSIFIES, TAGS, LabelRow
from memfit.model.modules import Weight

VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_position_embeddings": 16,
}


def tower(fields: Fields) -> tuple[Weight, ...]:
    return qwen3_tower(fields.section("vision_config"))


def with_tower(row: Row, name: str, label_heads: tuple[LabelRow, ...] = ()) -> Row:
    """The row of a text model, of the class that has a tower beside it."""

    def whole(text: Mapping[str, Any]) -> Mapping[str, Any]:
        vision = {**VISION, "out_hidden_size": text["hidden_size"]}
        return {
            "model_type": name,
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": text,
            "vision_config": vision,
        }

    examples = tuple(map(whole, row.examples))
    return replace(
        row,
        name=name,
        text="text_config",
        examples=examples,
        tower=tower,
        own_positions=True,
        label_heads=label_heads,
    )


captured(with_tower(ROW, "qwen3_5", (CLASSIFIES, TAGS)), alone=text_of)
