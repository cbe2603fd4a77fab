"""One process's GPUs: a hook moves what a layer is given to the layer's GPU (accelerate 1.15
hooks.py AlignDevicesHook): hidden states where they come from the GPU before, and in each layer of
another GPU than the first the masks and rotary tables that the model made on the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.lower.engine import Engine
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.parallel.fsdp2.engine import OUTSIDE
from memfit.program import Program
from memfit.strategy import Strategy
from memfit.techniques.remote_code import FAMILIES

if TYPE_CHECKING:
    from memfit.lower.context import Context


class Split(Engine):
    def __init__(self, r: Recorder, program: Program) -> None:
        super().__init__(r, program)
        self.around = program.job.version("transformers") >= OUTSIDE and not brought(program)

    @staticmethod
    def foldable(strategy: Strategy) -> bool:
        """What a reentrant checkpoint was given goes with the whole graph, not in its layer's
        span."""
        return False

    def before(self, name: str, x: Tensor) -> Tensor:
        if x.storage is not None:
            return x
        return self.r.node("to_device", moved(self.r, x), (x,), moved_back)

    def made(self, ctx: Context) -> None:
        """On the first GPU: here they have no bytes."""
        if self.program.stage is not None and not self.program.stage.chunks[0].begins:
            every(ctx, lambda one: Tensor(one.shape, one.format, None))

    def given(self, ctx: Context) -> Context:
        if self.program.stage is None or self.program.stage.chunks[0].begins:
            return ctx
        own = replace(ctx)
        every(own, lambda one: moved(self.r, one))
        return own


def every(ctx: Context, change: Callable[[Tensor], Tensor]) -> None:
    """Masks, tables and distances, each once."""
    known: dict[int, Tensor] = {}

    def once(one: Tensor | None) -> Tensor | None:
        if one is None:
            return None
        if id(one) not in known:
            known[id(one)] = change(one)
        return known[id(one)]

    ctx.masks = {window: once(mask) for window, mask in ctx.masks.items()}
    ctx.tables = {kind: (once(cos), once(sin)) for kind, (cos, sin) in ctx.tables.items()}
    ctx.cos, ctx.sin, ctx.distances = once(ctx.cos), once(ctx.sin), once(ctx.distances)


def moved(r: Recorder, x: Tensor) -> Tensor:
    return r.tensor(x.shape, x.format, "to_device")


def moved_back(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (Tensor(g.shape, g.format, None),)


def brought(program: Program) -> bool:
    """Whose own loop checkpoints layers and their hooks with them."""
    return program.model.family in FAMILIES


ENGINE = Split
