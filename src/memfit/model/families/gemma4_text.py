"""Gemma 4's language model alone, by the graphs that were captured beside its towers."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._captured import Row, graphs_of, model_of, stored
from memfit.model.families._composite import rooted
from memfit.model.families.gemma4 import ROWS, choose
from memfit.model.model import Model

ROOT = "model.language_model."


def alone(row: Row) -> Row:
    texts = tuple(one["text_config"] for one in row.examples)
    return replace(
        row, text="", ties="", tower=None, idle=(), last=(), heads=("causal-lm",), examples=texts
    )


TEXT = tuple(map(alone, ROWS))


@family("gemma4_text", examples=tuple(one for row in TEXT for one in row.examples), graphs=True)
def build(fields: Fields) -> Model:
    row = TEXT[choose(Fields({"text_config": fields.config}))]
    return replace(text_model(row, fields), family="gemma4_text")


def text_model(row: Row, fields: Fields) -> Model:
    """The model without towers, whose names begin otherwise."""
    found = model_of(row, fields, stored(row.name), graphs_of(row.name))
    return rooted(found, ROOT, "model.")
