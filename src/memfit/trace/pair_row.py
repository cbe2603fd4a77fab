"""`memfit new-family`: what an encoder with a decoder adds to an encoder: a second stack of layers,
layers that training may skip, and special tokens with fixed ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memfit.trace import classes
from memfit.trace.depth import shapes_of
from memfit.trace.program import configuration

if TYPE_CHECKING:
    from memfit.trace.new_family import Subject

HEAD = "seq2seq-lm"
MOST_LAYERS = 64  # a field with more counts something else
LEAST_WORDS = 544  # of the models that are captured
NUMBER = re.compile(r"\.(\d+)\.")
TOKEN = re.compile(r".*_token_id")
SKIPS = re.compile(r".*layer_?drop")
POSITIONS = re.compile(r".*position_embeddings|n_positions")


def stacks_of(subject: Subject) -> dict[str, str]:
    """The fields that count layers, the encoder's first: one more brings a layer to one list, whose
    path is the value."""
    whole = {"model_type": subject.kind, **subject.whole}
    if classes.builder(HEAD, configuration(whole, None)) is None:
        return {}
    before = shapes_of(whole, HEAD)
    found: dict[str, str] = {}
    for key, value in subject.whole.items():
        if type(value) is not int or not 0 < value <= MOST_LAYERS:
            continue
        try:
            more = shapes_of({**whole, key: value + 1}, HEAD)
        except Exception:  # noqa: BLE001 - a class may refuse the value, in any way
            continue
        lists = {list_of(name, value) for name in more.keys() - before.keys()}
        if len(lists) == 1 and before.keys() < more.keys() and "" not in lists:
            found[key] = lists.pop()
    return dict(sorted(found.items(), key=lambda one: "encoder" not in one[1].split(".")))


def list_of(name: str, number: int) -> str:
    """The list whose entry of this number has the weight; empty where there is none."""
    mark = next((one for one in NUMBER.finditer(name) if int(one[1]) == number), None)
    return "" if mark is None else name[: mark.start()]


def following(subject: Subject, stacks: Sequence[str]) -> dict[str, list[str]]:
    """For each stack, its field, and the field that the class takes where that one is missing."""
    found: dict[str, list[str]] = {}
    for key in stacks:
        found[key] = [key]
        for other in stacks:
            changed = configuration({"model_type": subject.kind, other: 7}, None).to_dict()
            if other != key and changed.get(key) == 7:
                found[key].append(other)
    return found


def base_of(subject: Subject) -> dict[str, Any]:
    """Fields that every run has: no layer is skipped, and tokens are among the words."""
    whole = subject.whole
    tokens = {
        key: 1
        for key, value in whole.items()
        if TOKEN.fullmatch(key) and type(value) is int and value >= LEAST_WORDS
    }
    return {**tokens, **dict.fromkeys(skips(whole), 0.0)}


def skips(whole: Mapping[str, Any]) -> list[str]:
    """The fields that say how often training skips a layer: the steps that skip none have the
    peak."""
    return [
        key for key, value in whole.items() if SKIPS.fullmatch(key) and type(value) in (int, float)
    ]


def other_tables(dims: Sequence[str], positions: str) -> list[str]:
    """Sizes that count positions under another name."""
    return [key for key in dims if POSITIONS.fullmatch(key) and key != positions]


__all__ = ["HEAD", "base_of", "following", "other_tables", "skips", "stacks_of"]
