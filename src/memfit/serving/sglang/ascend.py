"""What is left in use on an Ascend NPU once ModelSlim's weights are loaded.

Each int8 matrix is transposed and cast to the NPU's own layout after loading, and the cache is
emptied after each module. SGLang's guides for Ascend set `expandable_segments:True`: such a segment
gives back whole pages of 20 MiB alone, so a hole that a matrix leaves keeps up to two parts of
pages. Sources: SGLang 0.5.7 `hardware_backend/npu/quantization/`, `model_loader/loader.py`
load_weights_and_postprocess and `layers/moe/ep_moe/layer.py` NpuFuseEPMoE; torch_npu
`csrc/core/npu/NPUCachingAllocator.cpp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated

from memfit.constants import counted
from memfit.serving.stored import Relaid, RelaidHalves, RelaidStack
from memfit.serving.vllm.rules import parse
from memfit.simulate.allocator import Allocator
from memfit.simulate.settings import Settings

TAIL: Annotated[int, counted("bytes behind each tensor", "NPUCachingAllocator.cpp round_size")] = 32
VIEWS = (0, 5, 9)  # experts are cast from a transposed view from here on
EMPTIED_ONCE = (0, 5, 10)  # the cache is emptied at the end alone from here on


class Loading:
    """An NPU's allocator while weights are loaded."""

    def __init__(self) -> None:
        self.allocator = Allocator(Settings(expandable_segments=True))
        self.count = 0

    def put(self, size: int) -> int:
        self.count += 1
        self.allocator.malloc(self.count, size + TAIL)
        return self.count

    def drop(self, *names: int) -> None:
        for name in names:
            self.allocator.free(name)

    def copy(self, size: int, old: int) -> int:
        """A copy that takes the place of another tensor."""
        made = self.put(size)
        self.drop(old)
        return made

    def relay(self, size: int, name: int) -> None:
        """Transposed, then cast."""
        self.copy(size, self.copy(size, name))

    def cast_view(self, size: int, name: int) -> None:
        """Cast from a view, of which the operator makes a copy."""
        inner = self.put(size)
        self.put(size)
        self.drop(inner, name)

    def relay_both(self, sizes: Sequence[int], names: Sequence[int]) -> None:
        """Both stacks of a layer's experts: transposed, then cast."""
        copies = [self.copy(size, name) for size, name in zip(sizes, names, strict=True)]
        for size, name in zip(sizes, copies, strict=True):
            self.copy(size, name)

    def relay_fused(self, sizes: Sequence[int], names: Sequence[int], kept: bool) -> None:
        """Both stacks for the fused dispatch: the first is transposed, laid out by way of CPU
        memory and cast, the second cast as it is. `kept`: the model has listed its experts before,
        and holds the old one."""
        first, second = sizes
        self.copy(first, self.copy(first, self.copy(first, names[0])))
        self.put(second)
        if not kept:
            self.drop(names[1])


def loaded_bytes(
    sizes: tuple[int, ...], version: str, fused: bool = False, listed: bool = False
) -> int:
    """Bytes of the device that are gone after loading tensors of these sizes, those of a quantized
    matrix as `Relaid`. `fused`: `--moe-a2a-backend ascend_fuseep`; `listed`: the model lists its
    experts while it loads them."""
    return loaded(sizes, tuple(map(type, sizes)), version, fused, listed)


@lru_cache(64)
def loaded(
    sizes: tuple[int, ...], kinds: tuple[type, ...], version: str, fused: bool, listed: bool
) -> int:
    """The same; sizes of other kinds are equal as numbers, so `kinds` tells them apart."""
    number, loading = parse(version), Loading()
    names = [loading.put(size) for size in sizes]
    for module in modules(sizes):
        parts, held = [sizes[at] for at in module], [names[at] for at in module]
        if len(module) == 1:
            loading.relay(parts[0], held[0])
        elif fused:
            loading.relay_fused(parts, held, listed and number < VIEWS)
        elif number >= VIEWS and not isinstance(parts[0], RelaidHalves):
            for size, name in zip(parts, held, strict=True):
                loading.cast_view(size, name)
        else:
            loading.relay_both(parts, held)
        if number < EMPTIED_ONCE:
            loading.allocator.empty_cache()
    loading.allocator.empty_cache()
    return loading.allocator.reserved


def modules(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Places of the matrices of each module: one, or both stacks of experts."""
    stacks: list[int] = []
    for at, size in enumerate(sizes):
        if isinstance(size, RelaidStack):
            stacks.append(at)
            if len(stacks) == 2:
                yield stacks
                stacks = []
        elif isinstance(size, Relaid):
            yield [at]
