"""`memfit new-family`: what an encoder with a decoder adds to an encoder: a second stack of layers,
layers that training may skip, and special tokens with fixed ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memfit.trace import classes
from memfit.trace.capture import Call
from memfit.trace.depth import shapes_of
from memfit.trace.paths import layer_of
from memfit.trace.program import configuration

if TYPE_CHECKING:
    from memfit.trace.new_family import Subject

HEAD = "seq2seq-lm"
MOST_LAYERS = 64  # a field with more counts something else
LEAST_WORDS = 544  # of the models that are captured
NUMBER = re.compile(r"\.(\d+)\.")
TOKEN = re.compile(r".*_token_id")
SKIPS = re.compile(r".*layer_?drop")
TABLE = re.compile(r".*position_embeddings|n_positions")
POSITIONS = {"max_position_embeddings": "max_target_positions"}  # of a decoder beside sounds
STARTS = ("decoder_start_token_id", "pad_token_id")  # what labels are shifted and filled with


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


def alone(subject: Subject) -> dict[str, str]:
    """For each head that runs one of the two stacks alone, the kinds of its layers."""
    found: dict[str, str] = {}
    for head, before in subject.before.items():
        calls = (one.where for one in before.run.log if isinstance(one, Call))
        lists = {layer.rpartition(".")[0] for one in calls if (layer := layer_of(one))}
        ran = [
            kind
            for kind, path in zip(("encoder", "decoder"), subject.stacks.values(), strict=True)
            if any(f".{one}".endswith(f".{path}") for one in lists)
        ]
        if len(ran) == 1:
            found[head] = ran[0]
    return found


def base_of(subject: Subject) -> dict[str, Any]:
    """Fields that every run has: no layer is skipped, tokens are among the words, and labels can be
    shifted, which needs two of them."""
    whole = subject.whole
    starts = {key: 0 for key in STARTS if whole.get(key) is None}
    tokens = {
        key: 1
        for key, value in whole.items()
        if TOKEN.fullmatch(key) and type(value) is int and value >= LEAST_WORDS
    }
    return {**starts, **tokens, **dict.fromkeys(skips(whole), 0.0)}


def hears(subject: Subject) -> bool:
    """Whether the encoder is given sounds, whose length the config says."""
    config = configuration({"model_type": subject.kind}, None)
    own: Any = classes.classes(classes.builder(HEAD, config), config)[0]
    return own.main_input_name in ("input_features", "input_values")


def skips(whole: Mapping[str, Any]) -> list[str]:
    """The fields that say how often training skips a layer: the steps that skip none have the
    peak."""
    return [
        key for key, value in whole.items() if SKIPS.fullmatch(key) and type(value) in (int, float)
    ]


def other_tables(dims: Sequence[str], positions: str) -> list[str]:
    """Sizes that count positions under another name."""
    return [key for key in dims if TABLE.fullmatch(key) and key != positions]


__all__ = ["HEAD", "base_of", "following", "other_tables", "skips", "stacks_of"]
