"""DeepSpeed's ZeRO-1 and ZeRO-2 (deepspeed 0.19.8 runtime/zero/stage_1_and_2.py).

Trained parameters are views of one flat buffer per group of the optimizer; each rank keeps fp32
copies and states of an equal part of it. Gradients go through a bucket: at each one's arrival
(ZeRO-2, or where communication overlaps), or when the last backward is over (ZeRO-1). A bucket that
is full is summed up; gradients that lie in this rank's partition, be it by one value, are then
copied whole into a buffer of their own, the others go (ZeRO-2). A micro-batch before the last
leaves that buffer to be added to.

With the optimizer on the host, so are copies, states and gradients of the partition: each gradient
of it goes there as soon as it is summed up, by way of an fp32 copy.

Left out: the padding of a parameter's start (`parameter_alignment`), gradients summed up in other
numbers than the weights'.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING

from memfit.formats import FP32
from memfit.lazy_dataclass import dataclass
from memfit.lower.engine import silently
from memfit.lower.optimize import Stepper
from memfit.lower.recorder import Recorder
from memfit.lower.shards import COMPUTE, REDUCE, settle, settled
from memfit.lower.tensors import Storage, Tensor
from memfit.parallel.zero.engine import ZeRO, norm, overlap, stepper_of
from memfit.parallel.zero.partitions import distinct_ranks, part_of
from memfit.program import Program
from memfit.strategy import Strategy
from memfit.tape import Trim

if TYPE_CHECKING:
    from memfit.lower.body import Body


@dataclass(slots=True, kw_only=True, eq=False)
class Flat:
    """A group of the optimizer: its parameters in the order of the flat buffer, and where each
    begins there."""

    leaves: list[Tensor]
    starts: list[int]
    part: int  # values of one rank's partition
    storage: Storage | None = None
    master: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class Bucket:
    leaves: list[Tensor] = field(default_factory=list)
    count: int = 0
    buffers: list[Storage | None] = field(default_factory=list)
    index: int = 0


class ZeRO12(ZeRO):
    def __init__(self, r: Recorder, program: Program) -> None:
        super().__init__(r, program)
        self.flats: list[Flat] = []
        self.place: dict[
            int, tuple[Flat, int]
        ] = {}  # of a parameter: its group, and where it begins there
        self.bucket = Bucket()
        self.own: Storage | None = None  # this micro-batch's gradients of the partition,
        self.added: list[
            list[Storage | None]
        ] = []  # and what the step takes of each group: contiguous ones share a buffer
        self.eager = self.layout.stage == 2 or self.layout.overlap
        self.stream = REDUCE if self.layout.overlap else COMPUTE
        self.away = self.layout.offload_optimizer != "none"
        self.contiguous = self.layout.contiguous or self.away
        self.way: Storage | None = None  # on which gradients come back from the host to be added to

    @staticmethod
    def passing(strategy: Strategy) -> Strategy:
        """There are no hooks at modules: both stages, and what they keep on the host, are told of
        gradients alone."""
        assert strategy.zero is not None
        return ZeRO.passing(
            replace(strategy, zero=type(strategy.zero)(size=strategy.zero.size, stage=1))
        )

    @staticmethod
    def distinct_ranks(
        program: Program, *, every: bool, lightest: bool
    ) -> tuple[tuple[int, int], ...] | None:
        if program.strategy.partitions == 1:
            return None
        return distinct_ranks(program, every=every, lightest=lightest)

    # ----------------------------------------------------------------------------------- the start
    def load(self, body: Body) -> None:
        self.bring(body)
        self.r.mark("prepare")
        for group in self.groups(body):
            self.flats.append(self.flattened(group))
        if self.away:
            largest = max(leaf.count for flat in self.flats for leaf in flat.leaves)
            self.way = self.r.scratch(self.format.bytes(largest), "way", "gradients")
        for flat in self.flats if not self.away else ():  # initialize_optimizer_states
            zeros = self.r.scratch(4 * flat.part, "zeros", "gradients")
            del zeros

    def bring(self, body: Body) -> None:
        """The model is cast on the host and moved."""
        if self.program.quant is not None:  # packed on the GPU
            super().load(body)
            self.cast(body)
            return
        with silently(self.r):
            body.load()
            body.adapt()
            self.cast(body)
        for unit in settled(self, body):
            for leaf in unit.leaves:
                settle(self.r, leaf, "weights")

    def flattened(self, group: list[Tensor]) -> Flat:
        """The parameters become views of one buffer; this rank's part of it is cloned, and the
        clone cast."""
        r = self.r
        r.write(Trim())
        leaves = self.ordered(group)
        starts, total = [], 0
        for leaf in leaves:
            starts.append(total)
            total += leaf.count
        flat = Flat(leaves=leaves, starts=starts, part=part_of(total, self.ranks))
        flat.storage = r.scratch(self.format.bytes(flat.part * self.ranks), "flat", "weights")
        for leaf, start in zip(leaves, starts, strict=True):
            leaf.storage = flat.storage
            self.place[id(leaf)] = flat, start
        clone = (
            r.scratch(self.format.bytes(flat.part), "clone", "temporaries")
            if self.format is not FP32 or self.away
            else None
        )
        if self.away:
            del clone
            return flat
        flat.master = r.tensor((flat.part,), FP32, "master", "master")
        del clone
        return flat

    def ordered(self, group: list[Tensor]) -> list[Tensor]:
        """With `round_robin_gradients` the first rank's are each W-th, so that neighbours fall to
        different ranks (_round_robin_reorder)."""
        return (
            [one for first in range(self.ranks) for one in group[first :: self.ranks]]
            if self.layout.round_robin
            else group
        )

    def stepper(self, body: Body) -> Stepper:
        masters = [flat.master for flat in self.flats if flat.master is not None]
        return stepper_of(self, masters, self.gradient)

    # ---------------------------------------------------------------------------------- every step
    def owned(self, leaf: Tensor) -> int:
        """Values of a parameter that lie in this rank's partition."""
        flat, start = self.place[id(leaf)]
        return overlap(start, leaf.count, self.rank * flat.part, (self.rank + 1) * flat.part)

    def ready(self, leaf: Tensor) -> None:
        if id(leaf) not in self.place:
            return
        where, self.r.where = self.r.where, self.r.span
        self.prepare()
        if self.eager and (self.layout.stage == 2 or self.last):
            self.put(leaf)
        self.r.where = where

    def prepare(self) -> None:
        """Buffers of the bucket, from the first gradient on (setup_buckets)."""
        bucket = self.bucket
        if self.contiguous and not bucket.buffers:
            size = self.format.bytes(self.layout.reduce_bucket)
            bucket.buffers = [
                self.r.scratch(size, "bucket", "communication")
                for _ in range(1 + self.layout.overlap)
            ]
            bucket.index = 0

    def put(self, leaf: Tensor) -> None:
        """Into the bucket, which is summed up first if there is no room; what has room in none
        stays by itself."""
        bucket, limit = self.bucket, self.layout.reduce_bucket
        if bucket.count + leaf.count > limit:
            self.reduce()
            if self.contiguous and self.layout.overlap:
                bucket.index = 1 - bucket.index
        if self.contiguous and leaf.count <= limit:
            leaf.grad = Tensor(leaf.shape, leaf.format, bucket.buffers[bucket.index])
        elif self.away:  # a copy, so that nothing else can change it
            leaf.grad = self.r.tensor(leaf.shape, leaf.format, "clone", "gradients")
        bucket.leaves.append(leaf)
        bucket.count += leaf.count

    def reduce(self) -> None:
        """Neighbours in the bucket that belong to one rank are one slice; several slices are put
        together for the sum (average_tensor, allreduce_and_scatter)."""
        bucket, r = self.bucket, self.r
        if not bucket.leaves:
            return
        apart = self.contiguous and bucket.count > self.layout.reduce_bucket
        slices = self.slices(bucket.leaves) if apart else self.ends(bucket)
        held = count = 0
        for place, size in enumerate(slices, 1):
            held, count = held + size, count + 1
            if held > self.layout.reduce_bucket or place == len(slices):
                together = (
                    r.scratch(self.format.bytes(held), "flatten", "communication", self.stream)
                    if count > 1
                    else None
                )
                wide = (
                    r.scratch(self.wire.bytes(held), "to", "communication", self.stream)
                    if self.wire is not self.format
                    else None
                )
                r.comm("all_reduce", self.wire.bytes(held), self.ranks, "zero", self.stream)
                del together, wide
                held = count = 0
        for leaf in bucket.leaves:
            self.settle(leaf)
        bucket.leaves, bucket.count = [], 0

    def ends(self, bucket: Bucket) -> list[int]:
        """As many slices as matter where all of them are one sum: one, or several."""
        if not self.contiguous:
            return [leaf.count for leaf in bucket.leaves]
        places = [(*self.place[id(leaf)], leaf.count) for leaf in bucket.leaves]
        ranks = {
            (start + away) // flat.part for flat, start, count in places for away in (0, count - 1)
        }
        return [bucket.count] if len(ranks) == 1 else [0, bucket.count]

    def slices(self, leaves: list[Tensor]) -> list[int]:
        found: list[tuple[int, int]] = []  # (rank, values)
        for leaf in leaves:
            flat, start = self.place[id(leaf)]
            at = start
            while at < start + leaf.count:
                rank = at // flat.part
                size = min(start + leaf.count, (rank + 1) * flat.part) - at
                if found and found[-1][0] == rank:
                    found[-1] = rank, found[-1][1] + size
                else:
                    found.append((rank, size))
                at += size
        return [size for _, size in found]

    def settle(self, leaf: Tensor) -> None:
        """What becomes of a gradient that was summed up (reduce_ipg_grads,
        copy_grads_in_partition)."""
        if not self.owned(leaf):
            if self.layout.stage == 2:
                leaf.grad = None
        elif self.away:
            self.send(leaf)
        elif self.contiguous:
            if self.own is None:
                self.own = self.r.scratch(
                    self.format.bytes(sum(self.mine())), "partition", "gradients"
                )
            leaf.grad = Tensor(leaf.shape, leaf.format, self.own)

    def send(self, leaf: Tensor) -> None:
        """To the host: the norm is taken of a wide copy, and what goes is an fp32 one, after the
        last micro-batch (copy_grads_in_partition)."""
        if self.last:
            norm(self.r, (self.owned(leaf),), self.stream)
            wide = (
                self.r.scratch(4 * self.owned(leaf), "to", "gradients", self.stream)
                if self.format is not FP32
                else None
            )
            del wide
        leaf.grad = None

    def mine(self) -> list[int]:
        """Sizes of the parameters that reach into this rank's partition."""
        return [leaf.count for flat in self.flats for leaf in flat.leaves if self.owned(leaf)]

    def finish(self) -> None:
        """A backward is over (independent_gradient_partition_epilogue)."""
        if self.layout.stage == 1 and not self.last:
            return
        if not self.eager:
            for flat in self.flats:
                for leaf in flat.leaves:
                    if leaf.grad is not None:
                        self.put(leaf)
        self.reduce()
        kept = [[self.own] if self.contiguous else self.whole(flat) for flat in self.flats]
        self.added = self.added or kept
        self.own = None
        del kept
        self.bucket.buffers = []
        for flat in self.flats:
            for leaf in flat.leaves:
                leaf.grad = None

    def whole(self, flat: Flat) -> list[Storage | None]:
        """Gradients that were never copied anywhere."""
        return [
            leaf.grad.storage for leaf in flat.leaves if leaf.grad is not None and self.owned(leaf)
        ]

    # ------------------------------------------------------------------------------------ the step
    def gradient(self, index: int) -> Tensor | None:
        """This rank's part of a group's gradient, in one piece, in fp32; what it comes from goes, a
        shared buffer with the last group."""
        r = self.r
        r.where = ""
        if index == 0:
            norm(
                r, [count for flat in self.flats for count in map(self.owned, flat.leaves) if count]
            )
        flat = self.flats[index]
        pieces = [count for count in map(self.owned, flat.leaves) if count]
        together: Storage | None = (
            self.added[index][0] if self.added and self.added[index] else None
        )
        if len(pieces) + (sum(pieces) < flat.part) > 1:
            together = r.scratch(self.format.bytes(flat.part), "flatten", "gradients")
        if self.format is not FP32:
            together = r.scratch(4 * flat.part, "float", "gradients")
        if self.added:
            self.added[index] = []
        if index == len(self.flats) - 1:
            self.added = []
        return Tensor((flat.part,), FP32, together)

    def stepped(self, step: int) -> None:
        for flat in self.flats:
            self.r.comm("all_gather", self.format.bytes(flat.part * self.ranks), self.ranks, "zero")


ENGINE = ZeRO12
