"""Exact tensors of a file, compared with the model that its config describes: a GGUF's own blocks,
and a check of safetensors names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from memfit.errors import Problem
from memfit.model.model import Model, Stored

_LAYER = re.compile(r"(?:^|\.)(?:blk|layers|h|blocks|block)\.(\d+)\.")
SHOWN = 5


class Tensor(Protocol):
    """What a file says of one tensor."""

    @property
    def name(self) -> str: ...
    @property
    def bytes(self) -> int: ...


def with_blocks(model: Model, tensors: Iterable[Tensor]) -> Model:
    """The model whose weights lie in memory as the file stores them, each tensor with its own
    quantization."""
    return replace(
        model, stored=tuple(Stored(layer_of(one.name), one.name, one.bytes) for one in tensors)
    )


def layer_of(name: str) -> int:
    """The layer a tensor belongs to, or −1 for the model's ends."""
    found = _LAYER.search(name)
    return int(found[1]) if found else -1


def doubts(model: Model, tensors: Iterable[Tensor]) -> Iterator[Problem]:
    """Where the file and the formulas name different tensors: what is missing on either side."""
    theirs = {one.name for one in tensors}
    ours = {weight.name for weight in model.weights()}
    for names, message in (
        (theirs - ours, "the file has tensors that the formulas do not expect"),
        (ours - theirs, "the file lacks tensors that the formulas expect"),
    ):
        if names:
            some = ", ".join(f"`{name}`" for name in sorted(names)[:SHOWN])
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            yield Problem(
                message=f"{message}: {some}{more}",
                where="model",
                level="warning",
                hint="`--by trace` runs the real code",
            )
