"""Collectives among the ranks of one layout, with the buffers that they allocate."""

from __future__ import annotations

from memfit.lazy_dataclass import dataclass
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.program import Program


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """`size` ranks of the group `name`; `sequence`: between the split matrices each rank has its
    part of the tokens."""

    size: int
    name: str = "tp"
    sequence: bool = False

    @property
    def parts(self) -> int:
        """Into how many the tokens are split between matrices."""
        return self.size if self.sequence else 1

    def gather(self, r: Recorder, x: Tensor) -> Tensor:
        """All-gather along the first dimension, into a new tensor."""
        out = r.tensor(
            (x.shape[0] * self.size, *x.shape[1:]), x.format, "all_gather", "communication"
        )
        r.comm("all_gather", bytes_of(out), self.size, self.name)
        return out

    def scatter(self, r: Recorder, x: Tensor) -> Tensor:
        """Reduce-scatter along the first dimension, into a new tensor."""
        r.comm("reduce_scatter", bytes_of(x), self.size, self.name)
        return r.tensor((x.shape[0] // self.size, *x.shape[1:]), x.format, "reduce_scatter")

    def add_up(self, r: Recorder, x: Tensor) -> None:
        """All-reduce, in place."""
        r.comm("all_reduce", bytes_of(x), self.size, self.name)

    def exchange(self, r: Recorder, x: Tensor) -> Tensor:
        """All-to-all into a new tensor of as many values."""
        r.comm("all_to_all", bytes_of(x), self.size, self.name)
        return r.tensor(x.shape, x.format, "all_to_all", "communication")


def bytes_of(x: Tensor) -> int:
    return x.format.bytes(x.count)


def tensor_parallel(program: Program) -> Ranks:
    tp = program.strategy.tp
    return Ranks(
        size=program.strategy.size("tp"), sequence=tp is not None and tp.sequence and tp.size > 1
    )


def of(ctx: Context) -> Ranks:
    return tensor_parallel(ctx.program)


def scattered(r: Recorder, x: Tensor, ranks: Ranks) -> Tensor:
    """Sums over the ranks, each with its part of the tokens: backward gathers
    (core/tensor_parallel/mappings.py)."""
    return r.node("reduce_scatter", ranks.scatter(r, x), (x,), back_scattered, extra=ranks)


def back_scattered(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (node.extra.gather(r, g),)
