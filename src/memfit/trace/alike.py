"""DTensor works out for every tensor of a list how its operator is split (`_foreach_`, torch 2.13
distributed/tensor/_ops/single_dim_strategy.py): for layers that are all alike once is enough, and
takes a tenth of an optimizer's step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


def answers() -> list[tuple[Any, str, Any]]:
    """(owner, name, value)"""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    true = ShardingPropagator.propagate_op_sharding_non_cached

    def propagate(self: Any, schema: Any) -> Any:
        found = places(schema) if schema.op.name().startswith("aten::_foreach_") else None
        if found is None:
            return true(self, schema)
        first, place = found
        args = tuple(
            type(one)(one[index] for index in first) if isinstance(one, (list, tuple)) else one
            for one in schema.args_schema
        )
        few = true(self, type(schema)(schema.op, args, schema.kwargs_schema, schema.schema_info))
        if few.needs_redistribute:
            return true(self, schema)
        specs = few.output_spec
        return (
            dataclasses.replace(few, output_spec=type(specs)(specs[index] for index in place))
            if isinstance(specs, (list, tuple))
            else few
        )

    return [(ShardingPropagator, "propagate_op_sharding_non_cached", propagate)]


def places(schema: Any) -> tuple[list[int], list[int]] | None:
    """Which elements of the lists are unlike all before them, and for each element which of those
    it is like; None where all differ."""
    lists: list[Sequence[Any]] = [
        one for one in schema.args_schema if isinstance(one, (list, tuple))
    ]
    if not lists or any(len(one) != len(lists[0]) for one in lists):
        return None
    kinds: dict[Any, int] = {}
    first: list[int] = []
    place: list[int] = []
    for index, key in enumerate(zip(*lists, strict=True)):
        kind = kinds.setdefault(key, len(kinds))
        if kind == len(first):
            first.append(index)
        place.append(kind)
    return (first, place) if len(first) < len(place) else None


__all__ = ["answers"]
