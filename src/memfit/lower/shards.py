"""Code shared by sharding engines: gathered weights, their shards, and weights that stay
replicated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memfit.formats import Format
from memfit.lazy_dataclass import dataclass
from memfit.lower.engine import Engine, Unit, silently, units
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Elastic, Shape, Tensor
from memfit.tape import Part

if TYPE_CHECKING:
    from memfit.lower.body import Body
    from memfit.lower.bound import Bound

COMPUTE, GATHER, REDUCE, REPLICAS = 0, 1, 2, 3  # streams


@dataclass(slots=True, kw_only=True)
class Param:
    """A parameter: `leaf` is what the modules see while it is gathered, `shard` what this rank
    keeps and the optimizer steps on. `stored` is the format of the shard, `rows` those of the leaf
    with what fills up the last rank's."""

    leaf: Tensor
    shard: Tensor
    stored: Format
    rows: int

    @property
    def whole(self) -> int:
        """Values of the gathered parameter, those that fill up among them."""
        leaf = self.leaf
        return leaf.count // leaf.shape[0] * self.rows

    @property
    def storage(self) -> Elastic:
        assert isinstance(self.leaf.storage, Elastic)
        return self.leaf.storage


def cut(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """(rows of this rank, rows of the largest shard), as `torch.chunk` has it."""
    most = -(-rows // ranks)
    return max(0, min(most, rows - rank * most)), most


def bring(engine: Engine, body: Body) -> None:
    """The model, without a block so far: built on the meta device, or sharded on the host."""
    with silently(engine.r):
        body.load()
        body.adapt()


def settled(engine: Engine, body: Body) -> Iterator[Unit]:
    """The units in turn; whoever is given one is in its span, and what is no parameter there has
    its block."""
    r, seen = engine.r, set[str]()
    bounds = {bound.prefix: bound for bound in (body.ends, *body.layers)}
    for unit in units(body):
        r.mark("load", unit.span)
        if unit.span in bounds and unit.span not in seen:
            seen.add(unit.span)
            for tensor, part in whole(bounds[unit.span], body):
                settle(r, tensor, part)
        yield unit
    r.mark("load")


def settle(r: Recorder, tensor: Tensor, part: Part) -> None:
    """The tensor gets its block."""
    tensor.storage = r.tensor(tensor.shape, tensor.format, "parameter", part).storage


def whole(bound: Bound, body: Body) -> Iterator[tuple[Tensor, Part]]:
    """What every rank has: buffers, and what undoes the packing of weights."""
    for name in sorted(bound.buffers):
        yield bound[name], "buffers"
    for packed in bound.packed.values():
        for tensor in (packed.scales, *packed.nested, packed.code):
            if tensor is not None:
                yield tensor, "weights"
    if bound is body.ends:
        for tensor in body.shared:
            yield tensor, "weights"


def packed_weights(body: Body) -> frozenset[int]:
    """The weights that bitsandbytes stores, by identity."""
    return frozenset(
        id(one.weight) for bound in (body.ends, *body.layers) for one in bound.packed.values()
    )


def shard(r: Recorder, leaf: Tensor, ranks: int, rank: int) -> Tensor:
    """This rank's part along the first dimension; its block is as large as the largest rank's."""
    own, most = cut(leaf.shape[0], ranks, rank)
    rest: Shape = leaf.shape[1:]
    block = r.tensor((most, *rest), leaf.format, "shard", "weights")
    out = Tensor((own, *rest), leaf.format, block.storage)
    out.name, out.needs = leaf.name, leaf.needs
    return out
