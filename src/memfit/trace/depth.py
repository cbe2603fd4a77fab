"""Weights outside of the layers that depend on how many layers there are: the class is built with
other numbers of layers, and shapes are solved with that number as one more dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from memfit.graph.solve import Solver, Unsolved
from memfit.model.families._chains import LAYERS
from memfit.trace import classes
from memfit.trace.program import configuration
from memfit.trace.segments import Refused

Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(config: Mapping[str, Any], head: str) -> Shapes:
    """The parameters of the class of this head."""
    own = configuration(config, None)
    with torch.device("meta"):
        model = classes.builder(head, own).from_config(own)
    return {name: tuple(one.shape) for name, one in model.named_parameters()}


def buffers_of(config: Mapping[str, Any], head: str) -> Shapes:
    """The buffers of the class of this head."""
    own = configuration(config, None)
    with torch.device("meta"):
        model = classes.builder(head, own).from_config(own)
    return {name: tuple(one.shape) for name, one in model.named_buffers()}


def by_depth(
    configs: Sequence[Mapping[str, Any]],
    depth: str,
    head: str,
    names: Sequence[str],
    dims: Sequence[Mapping[str, int]],
) -> dict[str, list[str | int]]:
    """Those of `names` whose shape changes with the field `depth`, each with its shape."""
    counts = [config[depth] + place for place, config in enumerate(configs, 1)]
    deeper = [
        shapes_of({**config, depth: count}, head)
        for config, count in zip(configs, counts, strict=True)
    ]
    before = shapes_of(configs[0], head)
    solver = Solver([{**one, LAYERS: count} for one, count in zip(dims, counts, strict=True)])
    solver.check()
    found: dict[str, list[str | int]] = {}
    for name in names:
        if before[name] == deeper[0][name]:
            continue
        try:
            shapes = zip(*(one[name] for one in deeper), strict=True)
            found[name] = [solver.solved(sizes) for sizes in shapes]
        except Unsolved as bad:
            raise Refused(f"`{name}`: {bad}") from None
    return found


__all__ = ["by_depth", "shapes_of"]
