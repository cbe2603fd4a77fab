"""Llama 4's language model alone, by the graphs that were captured beside its tower."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._captured import Row, graphs_of, model_of, stored
from memfit.model.families._composite import rooted
from memfit.model.families.llama4 import ROWS
from memfit.model.model import Model

ROOT = "language_model."


def alone(row: Row) -> Row:
    texts = tuple(one["text_config"] for one in row.examples)
    return replace(row, text="", ties="", tower=None, idle=(), examples=texts)


TEXT = tuple(map(alone, ROWS))


@family("llama4_text", examples=tuple(one for row in TEXT for one in row.examples), graphs=True)
def build(fields: Fields) -> Model:
    if not fields.config.keys() - {"model_type"}:
        fields.config = {}  # no config of a model, whatever the class puts in its place
    row = TEXT[fields.config.get("use_qk_norm", True) is False]
    model = rooted(model_of(row, fields, stored(row.name), graphs_of(row.name)), ROOT, "")
    head = replace(model.head, name=model.head.name.removeprefix(ROOT))
    return replace(model, family="llama4_text", head=head)
