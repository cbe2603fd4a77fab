"""Which device `device_map="auto"` puts each module on: GPUs first, then CPU memory, then disk.

Rules: transformers 5.23 integrations/accelerate.py (get_balanced_memory, infer_auto_device_map) and
accelerate 1.15 utils/modeling.py, which it was made from. Modules are taken in the model's order; a
decoder layer is not split. The first GPU and the CPU keep room for the largest module that is still
to come, since an offloaded one has to come back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from memfit.errors import InputError, Problem
from memfit.formats import FORMATS
from memfit.hardware.gpu import GPU
from memfit.hardware.outside import context, usable
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.model.modules import Module
from memfit.program import Program
from memfit.strategy import Split
from memfit.units import parse_bytes

GPU_SHARE = 0.9  # of what is free, where `max_memory` does not say otherwise
NOTHING = re.compile(r"\s*0+\s*([kmgt]?i?b)?\s*", re.IGNORECASE)
ON_GPU, ON_CPU, ON_DISK = "gpu", "cpu", "disk"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Modules that go to one device together. `path` is that of the layer, or of the module."""

    path: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Limit:
    """`size` None: without a limit. `reserves`: keeps room for the largest module to come."""

    device: str
    size: int | None
    reserves: bool = False


def weights_of(modules: Iterable[Module], dtype: str) -> int:
    return sum(
        FORMATS[weight.format or dtype].bytes(weight.count)
        for module in modules
        for weight in module.weights()
    )


def path_of(module: Module) -> str:
    """The path of a module outside the layers, as its weights have it."""
    names = (weight.name.rpartition(".")[0] for weight in module.weights())
    return next(names, module.name)


def units(model: Model, dtype: str) -> list[Unit]:
    """The modules in order, buffers behind the final norm. A tied head is its embedding."""
    ends = [Unit(path=path_of(one), bytes=weights_of((one,), dtype)) for one in model.embed]
    layers = [
        Unit(path=model.path(index), bytes=weights_of((layer,), dtype))
        for index, layer in enumerate(model.layers)
    ]
    final = [Unit(path=path_of(one), bytes=weights_of((one,), dtype)) for one in model.final]
    tables = sum(FORMATS[one.format or dtype].bytes(one.count) for one in model.buffers)
    more = [Unit(path="buffers", bytes=tables)] if tables else []
    if not model.tied:
        more.append(Unit(path=model.head.name, bytes=weights_of((model.head,), dtype)))
    return [*ends, *layers, *final, *more]


def places(found: Sequence[Unit], limits: Sequence[Limit]) -> dict[str, str]:
    """The device of each unit, by its path. What no limit has room for lies on disk."""
    devices = [*limits, Limit(device=ON_DISK, size=None)]
    to_come = [0] * (len(found) + 1)  # the largest behind each unit
    for index in range(len(found) - 1, -1, -1):
        to_come[index] = max(found[index].bytes, to_come[index + 1])
    placed: dict[str, str] = {}
    at = used = 0
    for index, unit in enumerate(found):
        while True:
            limit = devices[at]
            room = to_come[index + 1] if limit.reserves else 0
            if limit.size is None or used + unit.bytes <= limit.size - room:
                break
            at, used = at + 1, 0
        placed[unit.path] = limit.device
        used += unit.bytes
    return placed


def limits(split: Split, gpu: GPU | None) -> list[Limit]:
    """What one GPU and the CPU may hold. `max_memory` of a user is taken as it is; else nine tenths
    of what is free."""
    size = amount(split.gpu, "gpu")
    if size is None and gpu is not None:
        size = int(GPU_SHARE * ((gpu.free or usable(gpu)) - context(gpu).low))
    cpu = amount(split.cpu, "cpu")
    return [
        Limit(device=ON_GPU, size=size, reserves=True),
        Limit(device=ON_CPU, size=cpu, reserves=True),
    ]


def amount(text: str, name: str) -> int | None:
    """Bytes, which may be none (`0GiB`); None where nothing is given."""
    if not text.strip():
        return None
    return 0 if NOTHING.fullmatch(text) else parse_bytes(text, where=f"use split.{name}")


def amount_problems(split: Split) -> list[Problem]:
    found: list[Problem] = []
    for name, text in (("gpu", split.gpu), ("cpu", split.cpu)):
        try:
            amount(text, name)
        except InputError as bad:
            found += bad.problems
    return found


def placed(program: Program) -> dict[str, str]:
    """The device of each module of a model on one GPU."""
    assert program.strategy.split is not None
    return places(
        units(program.model, program.weights), limits(program.strategy.split, program.gpu)
    )


def bytes_on(program: Program, device: str) -> int:
    """Weights that lie on this device while nothing runs."""
    where = placed(program)
    return sum(
        unit.bytes for unit in units(program.model, program.weights) if where[unit.path] == device
    )
