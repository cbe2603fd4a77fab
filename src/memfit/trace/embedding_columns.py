"""Columns that the losses of sentence-transformers read, in a data set that neither is there nor is
known."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from memfit.trace.asked_columns import Columns, marked
from memfit.trace.imports import Change, Patch
from memfit.trace.trainer_columns import grow

# What a loss reads: a part of its name, how many texts, and the kind of its label
# (sentence-transformers 6.2, docs/sentence_transformer/loss_overview.md and the like).
LOSSES = (
    ("Softmax|^CrossEntropy", 2, "label 3"),
    ("CoSENT|CosineSimilarity|AnglE|BinaryCrossEntropy", 2, "float"),
    ("ContrastiveTension", 1, ""),
    ("Contrastive", 2, "label 2"),
    ("^Batch", 1, "label 2"),
    ("Triplet", 3, ""),
    ("MultipleNegatives|GISTEmbed|MegaBatch", 2, ""),
)
LABELS = {"label", "labels", "score", "scores"}  # `BaseDataCollator.valid_label_columns`
NAMES = ("anchor", "positive", "negative")
# The trainers that the others are subclasses of, since version 6 and before, where two of them
# do not call it.
TRAINERS = {
    "sentence_transformers.base.trainer": "BaseTrainer",
    "sentence_transformers.trainer": "SentenceTransformerTrainer",
    "sentence_transformers.sparse_encoder.trainer": "SparseEncoderTrainer",
    "sentence_transformers.cross_encoder.trainer": "CrossEncoderTrainer",
}


def read_by(loss: Any) -> tuple[int, str]:
    """How many texts and which label a loss reads; it may be wrapped in another."""
    if isinstance(loss, dict):
        loss = next(iter(loss.values()), None)
    while hasattr(loss, "loss"):
        loss = loss.loss
    if loss is None:  # `SentenceTransformerTrainer.get_default_loss`
        return 2, "float"
    name = getattr(loss, "__name__", type(loss).__name__)
    found = (row for row in LOSSES if re.search(row[0], name))
    _, texts, label = next(found, ("", 0, ""))
    classes = getattr(loss, "num_labels", None)
    return texts, f"label {classes}" if label == "label 3" and classes else label


def completed(data: Any, texts: int, label: str, columns: Columns) -> Any:
    """The data set with as many texts as the loss reads. Those that the script has asked for come
    first."""
    if not hasattr(data, "_info") or not marked(data):
        return data
    there = list(next(iter(data), {}))
    named = [one for one in there if one not in LABELS]
    if len(named) > texts and "text" in named:  # which every stand-in has
        return data.remove_columns("text")
    wanted = dict.fromkeys(NAMES[len(named) : texts], "text")
    if label and not LABELS & set(there):
        wanted["label"] = label
    return grow(columns, data, wanted)


def trained(true: Callable[..., None], columns: Columns) -> Any:
    signature = inspect.signature(true)

    @functools.wraps(true)
    def init(self: Any, *args: Any, **given: Any) -> None:
        bound = signature.bind_partial(self, *args, **given)
        named = bound.arguments
        texts, label = read_by(named.get("loss"))
        for name in ("train_dataset", "eval_dataset") if texts else ():
            found = named.get(name)
            if isinstance(found, dict):
                for key, one in found.items():
                    found[key] = completed(one, texts, label, columns)
            elif found is not None:
                named[name] = completed(found, texts, label, columns)
        true(*bound.args, **bound.kwargs)

    return init


def changes(columns: Columns) -> dict[str, Change]:
    def change(name: str) -> Change:
        def changed(module: ModuleType) -> list[Patch]:
            kind = getattr(module, name)
            return [(kind, "__init__", trained(kind.__init__, columns))]

        return changed

    return {module: change(name) for module, name in TRAINERS.items()}


__all__ = ["changes"]
