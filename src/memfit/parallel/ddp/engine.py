"""torch's DistributedDataParallel: gradients are copied into buckets, which are summed up over the
ranks (torch 2.13 torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp).

Left out: communication hooks, DDP's own mixed precision, and buckets in NCCL's memory. The sum of a
bucket starts when its last gradient has come; here all are told of at the end of the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from memfit.formats import INT32
from memfit.lower.engine import ROOT, Engine, Unit, stage_units, unfolded, units
from memfit.lower.recorder import Recorder
from memfit.lower.shards import REDUCE
from memfit.lower.tensors import Storage, Tensor
from memfit.parallel.coalesced import COALESCED, IN_FLIGHT, Item, buckets
from memfit.parallel.flat_parameters import adapter
from memfit.program import Program
from memfit.tape import Part

if TYPE_CHECKING:
    from memfit.lower.body import Body

MIB = 2**20
FIRST, CAP = (
    MIB,
    25 * MIB,
)  # of buckets that nobody set (distributed_c10d.py _DEFAULT_FIRST_BUCKET_BYTES; distributed.py)


class DDP(Engine):
    repeats = False  # the first backward finds other buckets than the second

    def __init__(self, r: Recorder, program: Program) -> None:
        super().__init__(r, program)
        assert program.strategy.ddp is not None
        self.layout = program.strategy.ddp
        self.steps = 3 if self.layout.static_graph else 2
        self.buckets: list[Storage | None] = []
        self.sizes: list[int] = []
        self.order: list[tuple[str, Item]] = []  # of gradients as they came, by span
        self.forwards = 0
        self.rebuilt, self.last = False, True
        self.late: list[Tensor] = []  # whose gradients become views when the backward is over
        self.items: list[Item] = []  # trained ones, in the model's order
        self.unused: list[tuple[str, Item]] = []  # trained ones without a gradient
        self.others: list[Item] = []  # buffers
        self.map: Tensor | None = None

    # ----------------------------------------------------------------------------------- the start
    def load(self, body: Body) -> None:
        super().load(body)
        r = self.r
        held = [
            (bound.prefix, bound[name])
            for bound in (body.ends, *body.layers)
            for name in sorted(bound.buffers)
        ]
        self.others = [item(one) for one in unfolded(self.program, held)]
        capped = self.looks
        sizes: list[int] = []
        idle = {id(one) for one in (*body.idle, *filter(adapter, body.ends.idle))}
        r.mark("prepare")
        for some in self.wrapped(body):
            leaves = unfolded(
                self.program, [(unit.span, leaf) for unit in some for leaf in unit.leaves]
            )
            items = [item(leaf) for leaf in leaves if leaf.needs or id(leaf) in idle]
            self.unused += [(ROOT, item(leaf)) for leaf in leaves if id(leaf) in idle]
            self.broadcast([item(leaf) for leaf in leaves] + self.others)
            sizes += bucket_sizes(reversed(items), self.caps if capped else ())
            self.items += items
        self.make(sizes)
        if capped:  # which parameters were used
            self.map = r.tensor((len(self.items),), INT32, "used_map", "communication")

    @property
    def looks(self) -> bool:
        """For parameters without a gradient, after every forward."""
        return self.layout.find_unused == "yes" and not self.layout.static_graph

    def wrapped(self, body: Body) -> list[list[Unit]]:
        """The units that a DDP stands around: all, or those of a pipeline's stage."""
        stage = self.program.stage
        if stage is None or len(stage.chunks) == 1:
            return [list(units(body))]
        return [
            [unit for unit in units(body) if unit.name in names]
            for names in stage_units(body, stage)
        ]

    @property
    def caps(self) -> tuple[int, ...]:
        return (self.layout.bucket_mb * MIB,) if self.layout.bucket_mb else (FIRST, CAP)

    def broadcast(self, items: Sequence[Item]) -> None:
        """The first rank's tensors go to the others in flat copies, two at a time."""
        flying: list[Storage | None] = []
        for size in bucket_sizes(items, (COALESCED,)):
            del flying[: len(flying) - IN_FLIGHT + 1]
            flying.append(self.r.scratch(size, "broadcast", "communication"))
            self.r.comm("broadcast", size, self.layout.size, "ddp")

    def make(self, sizes: list[int]) -> None:
        """New buckets; the old ones go first, unless gradients are views of them."""
        self.buckets, self.sizes = [], sizes
        part: Part = "communication"  # also where gradients are views of them
        self.r.where = ""
        for size in sizes:
            self.buckets.append(self.r.scratch(size, "bucket", part))

    # ---------------------------------------------------------------------------------- every step
    def begin(self, last: bool) -> None:
        self.last = last

    def before(self, name: str, x: Tensor) -> Tensor:
        if name != ROOT:
            return x
        if self.order and not self.rebuilt and self.r.grad and not self.looks:
            self.rebuilt = True
            self.make(bucket_sizes(unfolded(self.program, self.order + self.unused), self.caps))
        if self.r.grad and self.last and self.others:
            self.broadcast(self.others)
        return x

    def handed(self, outputs: list[Tensor]) -> None:
        """Copies of all (`_DDPSink`), with `find_unused` and in the first forward of a static
        graph."""
        wanted = not self.order if self.layout.static_graph else self.looks
        if not wanted:
            return
        copies = [self.r.tensor(one.shape, one.format, "clone", "logits") for one in outputs]
        if self.r.grad:
            outputs[:] = copies

    def ready(self, leaf: Tensor) -> None:
        """The gradient is copied into its bucket; with `gradient_as_bucket_view` it is a view of
        that from here on. In the first backward of a static graph that happens at the end."""
        if not self.last:
            return
        if not self.rebuilt:
            self.order.append((self.r.span, item(leaf)))
        if self.layout.static_graph and not self.rebuilt:
            self.late.append(leaf)
        else:
            self.view(leaf)

    def view(self, leaf: Tensor) -> None:
        if self.layout.bucket_view and self.buckets:
            leaf.grad = Tensor(leaf.shape, leaf.format, self.buckets[0])

    def finish(self) -> None:
        if not self.last:
            return
        self.r.where = ""
        for size in self.sizes:
            self.r.comm("all_reduce", size, self.layout.size, "ddp", REDUCE)
        while self.late:
            self.view(self.late.pop(0))


ENGINE = DDP


def item(tensor: Tensor) -> Item:
    return Item(tensor.format.bytes(tensor.count), tensor.format)


def bucket_sizes(items: Iterable[Item], caps: tuple[int, ...]) -> list[int]:
    return [sum(sizes) for sizes in buckets(items, caps)]


__all__ = ["DDP", "Item", "bucket_sizes"]
