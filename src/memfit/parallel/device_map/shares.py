"""How many layers each of several GPUs gets under `device_map="auto"`."""

from __future__ import annotations

from memfit.model.model import Model
from memfit.parallel.device_map.placement import Limit, places, units, weights_of
from memfit.program import Program
from memfit.strategy import Split

# of the largest module, beside an equal share (get_balanced_memory of accelerate 1.15
# utils/modeling.py and of transformers 5.23 integrations/accelerate.py)
SPARE = 1.25
LARGEST_LEAF = (5, 18)  # before, transformers took the mean of the leaves, as accelerate does


def shares(model: Model, gpus: int, dtype: str, version: tuple[int, int]) -> tuple[int, ...]:
    """Layers of each GPU, with this version of transformers: each but the last may hold an equal
    share of the bytes, and a quarter more than a layer or, since 5.18, than the largest of layers,
    embedding and head. The first keeps room for the largest module that is still to come."""
    found = units(model, dtype)
    most = max(
        *(weights_of((layer,), dtype) for layer in model.layers),
        max(unit.bytes for unit in found) if version >= LARGEST_LEAF else mean_leaf(model, dtype),
    )
    size = sum(unit.bytes for unit in found) // gpus + int(SPARE * most)
    limits = [
        Limit(device=str(gpu), size=size if gpu < gpus - 1 else None, reserves=gpu == 0)
        for gpu in range(gpus)
    ]
    where = places(found, limits)
    layers = [where[model.path(index)] for index in range(len(model.layers))]
    return tuple(layers.count(str(gpu)) for gpu in range(gpus))


def mean_leaf(model: Model, dtype: str) -> int:
    """Bytes of a linear layer in the mean, the head among them."""
    leaves = [*(one for layer in model.layers for one in layer.linears()), model.head]
    return weights_of(leaves, dtype) // len(leaves)


def counts(split: Split, program: Program) -> tuple[int, ...] | None:
    """Layers of each GPU; None where the setting is no list of numbers."""
    if not split.layers:
        version = program.job.version("transformers")
        return shares(program.model, split.size, program.weights, version)
    parts = split.layers.split("/")
    return (
        tuple(int(part) for part in parts)
        if all(part.isdecimal() and len(part) < 8 for part in parts)
        else None
    )
