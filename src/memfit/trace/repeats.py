"""Passes without gradients that a script repeats, as an evaluation over many batches does: once a
few of them have allocated alike, the others only leave their results."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from memfit.tape import Free
from memfit.trace import lines
from memfit.trace.generation import Generation, Growing
from memfit.trace.like import PLAIN, made, parts, plain, template, tensors_in
from memfit.trace.recorder import Block, Recorder

ALIKE = 3  # passes that must have been alike
# How much more memory than ever before may be alive when a pass is skipped: less than a block for
# which torch's allocator takes a large segment (c10/core/CachingAllocator kSmallSize, torch 2.13).
SLACK = 1 << 20
GATHERING = (list, dict, set, collections.deque)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What the passes of one kind have in common."""

    count: int = 0
    sizes: tuple[int, ...] = ()  # of what they allocated
    most: int = 0  # bytes that were alive when one of those that ran began
    result: Any = None


class Repeats:
    """What each module has done with inputs of each shape."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.known: dict[int, tuple[weakref.ref[Any], dict[Hashable, Passes]]] = {}
        self.skipped = 0
        self.generation, self.growing = Generation(), Growing()

    def run(
        self, module: torch.nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """The result of the module, or one like those that it has given so far."""
        shapes = shape_of((args, kwargs))
        if hooked(module):
            return call(module, *args, **kwargs)
        if shapes is None:
            skipped, result = self.generation.step(lambda: call(module, *args, **kwargs), kwargs)
            self.skipped += skipped
            return result
        form, sizes = split(shapes)
        ids = kwargs.get("input_ids")
        length = ids.shape[-1] if isinstance(ids, torch.Tensor) else 0
        if self.growing.skips(module, (form, torch.is_autocast_enabled()), sizes, length):
            self.skipped += 1  # in a loop of transformers', where a model stays as it is
            return self.growing.result()
        kinds, key = self.of(module), (state_of(module), shapes)
        before, alive = kinds.get(key, Passes()), self.alive()
        if before.count >= ALIKE and alive <= before.most + SLACK:
            self.skipped += 1
            return made(before.result)
        start, buffers = len(self.recorder.events), versions(module)
        result = call(module, *args, **kwargs)
        events = self.recorder.events[start:]
        allocated = tuple(one.size for one in events if isinstance(one, Block))
        kinds[key] = Passes(most=max(alive, before.most))
        new = (
            all(plain(one) for one in parts(result))
            and self.fresh([*tensors_in(result)], events)
            and unwritten(buffers, versions(module))
        )
        self.growing.ran(result, new)
        if new and (allocated == before.sizes or not before.count):
            kinds[key] = Passes(
                count=before.count + 1,
                sizes=allocated,
                most=max(alive, before.most),
                result=template(result),
            )
        return result

    def of(self, module: torch.nn.Module) -> dict[Hashable, Passes]:
        """By the module itself, which stays free to die: another may get its address."""
        found = self.known.get(id(module))
        if found is None or found[0]() is not module:
            found = self.known[id(module)] = (weakref.ref(module), {})
        return found[1]

    def alive(self) -> int:
        """Bytes on the GPU now."""
        return sum(one.size for one in self.recorder.blocks.values() if one.alive)

    def fresh(self, leaves: list[torch.Tensor], events: Iterable[Any]) -> bool:
        """Whether nothing but the results has come to stay."""
        stay = {one.id for one in events if isinstance(one, Block)}
        stay -= {one.id for one in events if isinstance(one, Free)}
        blocks = [self.recorder.owned(one) for one in leaves]
        return {one.id for one in blocks if one is not None} == stay and len(stay) == len(leaves)


def state_of(module: torch.nn.Module) -> Hashable:
    """What beside its inputs decides what a module allocates."""
    weights = tuple((one.shape, one.dtype, one.device) for one in module.parameters())
    parts = tuple(map(attributes, module.modules()))
    return weights, parts, torch.is_autocast_enabled(), torch.get_autocast_dtype("cuda")


def attributes(module: torch.nn.Module) -> Hashable:
    """Its numbers and flags, as `training`, how much it has gathered, and its hooks."""
    hooks = (*module._forward_pre_hooks, *module._forward_hooks)
    own = vars(module).items()
    lengths = tuple((name, len(one)) for name, one in own if isinstance(one, GATHERING))
    return hooks, lengths, tuple(one for one in own if isinstance(one[1], PLAIN))


def hooked(module: torch.nn.Module) -> bool:
    """Whether the script has hooks in it, which may keep what they are shown."""
    return any(
        lines.is_users(getattr(getattr(hook, "__code__", None), "co_filename", "<"))
        for one in module.modules()
        for hook in (*one._forward_pre_hooks.values(), *one._forward_hooks.values())
    )


def versions(module: torch.nn.Module) -> list[tuple[torch.Tensor, int]]:
    return [(one, 0 if one.is_inference() else one._version) for one in module.buffers()]


def unwritten(before: list[tuple[Any, int]], after: list[tuple[Any, int]]) -> bool:
    """Whether a module has the buffers that it had, and they hold what they held."""
    return [(id(one), number) for one, number in before] == [
        (id(one), number) for one, number in after
    ]


def shape_of(value: Any) -> Hashable:
    """Shapes in place of tensors; None where there is anything else that may change."""
    if isinstance(value, torch.Tensor):
        return (type(value), value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, PLAIN):
        return (type(value), value)
    if type(value) in (list, tuple):
        found = tuple(shape_of(one) for one in value)
        return None if None in found else found
    if type(value) is dict:
        return shape_of([*value.items()])
    return None


def split(shapes: Hashable) -> tuple[Hashable, list[int]]:
    """What `shape_of` gives, without sizes, and the sizes."""
    sizes: list[int] = []

    def form(value: Any) -> Hashable:
        if not isinstance(value, tuple) or type(value) is torch.Size:
            return value
        if len(value) > 1 and type(value[1]) is torch.Size:  # without strides
            sizes.extend(value[1])
            return (value[0], len(value[1]), *value[3:])
        return tuple(map(form, value))

    return form(shapes), sizes


__all__ = ["Repeats"]
