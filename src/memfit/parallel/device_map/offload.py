"""A model on one GPU whose last modules lie in CPU memory or on disk (`device_map="auto"`).

A hook copies the weights of an offloaded module to the GPU before its forward, and drops the copies
after it (accelerate 1.15 hooks.py AlignDevicesHook): one linear layer, norm or embedding at a time.
The GPU keeps the cache of all layers, and buffers such as rotary tables. Tensors are loaded where
they stay; the allocator is warmed up for those of the GPU (transformers 5.23 modeling_utils.py
caching_allocator_warmup).

Stacks of experts, and other weights whose modules memfit does not know, are counted for the length
of their layer, and so are layers of captured graphs. accelerate holds them while their module runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.lower.engine import EMBED, Engine, Leaves, module_leaves, silently
from memfit.lower.load import warm
from memfit.lower.recorder import Recorder
from memfit.lower.shards import settled
from memfit.lower.tensors import Elastic, Tensor
from memfit.parallel.device_map.placement import ON_GPU, bytes_on, placed
from memfit.program import Program
from memfit.strategy import Strategy

if TYPE_CHECKING:
    from memfit.lower.body import Body


class Offload(Engine):
    inner = True

    def __init__(self, r: Recorder, program: Program) -> None:
        super().__init__(r, program)
        self.places = placed(program)
        self.with_layer: dict[str, list[Elastic]] = {}

    @staticmethod
    def foldable(strategy: Strategy) -> bool:
        """Layers on the GPU and elsewhere are unlike."""
        return False

    def load(self, body: Body) -> None:
        r, program = self.r, self.program
        if all(place == ON_GPU for place in self.places.values()):
            super().load(body)
            return
        with silently(r):
            body.load()
        r.mark("load")
        r.where = ""
        warm(r, program, bytes_on(program, ON_GPU))
        captured = any(entry.layer.captured is not None for entry in program.entries)
        # a graph does not say which module runs
        alone = frozenset[int]() if captured else module_leaves(body)
        table = body.model.embed[0].name
        for unit in settled(self, body):
            for leaf in unit.leaves:
                module = leaf.name.rpartition(".")[0]
                r.where = ".".join(filter(None, (r.span, module)))
                place = self.places.get(unit.name) or self.places.get(module, ON_GPU)
                size = leaf.format.bytes(leaf.count)
                if place == ON_GPU:
                    leaf.storage = r.scratch(size, "parameter", "weights")
                    continue
                leaf.storage = r.elastic(size, "to_device", "weights")
                if id(leaf) not in alone:  # a tied table is among the last unit's leaves
                    for name in dict.fromkeys((unit.name, EMBED if module == table else unit.name)):
                        self.with_layer.setdefault(name, []).append(leaf.storage)

    def before(self, name: str, x: Tensor) -> Tensor:
        for storage in self.with_layer.get(name, ()):
            storage.take()
        return x

    def after(self, name: str, out: Tensor) -> Tensor:
        for storage in self.with_layer.get(name, ()):
            storage.drop()
        return out

    def enter(self, leaves: Leaves, x: Tensor) -> Tensor:
        for leaf in leaves:
            if leaf is not None and isinstance(leaf.storage, Elastic):
                leaf.storage.take()
        return x

    def leave(self, leaves: Leaves, out: Tensor) -> Tensor:
        for leaf in leaves:
            if leaf is not None and isinstance(leaf.storage, Elastic):
                leaf.storage.drop()
        return out


ENGINE = Offload
