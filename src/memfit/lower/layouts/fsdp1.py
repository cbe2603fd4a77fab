"""torch's FSDP1 (`FullyShardedDataParallel`): every unit's parameters are views of one flat tensor (torch 2.13
torch/distributed/fsdp/_flat_param.py, _runtime_utils.py; of 2.2 to 2.13 alike).

The all-gather writes into the flat tensor itself, on a stream of its own; the views are outputs of one `split`, whose backward puts all gradients
of the unit into a flat one while they still stand. What is freed is kept back for the streams that used it (`record_stream`), and at most two
freed units wait: then the program itself waits (`limit_all_gathers`). Left out: a CPU that is slower than the GPU, for which nothing waits;
`ignored_modules`, communication hooks, optimizers in the backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memfit.formats import FORMATS, Format
from memfit.lower.layouts.base import ROOT, Engine, Unit, gate
from memfit.lower.layouts.flat import FORWARD, IDLE, POST_BACKWARD, PRE_BACKWARD, Flat, Lent
from memfit.lower.layouts.shards import COMPUTE, GATHER, REDUCE, bring, settled
from memfit.lower.optimize import Spans
from memfit.lower.recorder import Grads, Node, Recorder, Storage, Tensor
from memfit.program import Program
from memfit.strategy import NAMES, Strategy
from memfit.tape import Part, Sync

if TYPE_CHECKING:
    from memfit.lower.body import Body

CAST, REPLICAS = 3, 4  # the streams that cast shards before they are gathered, and that add up what replicas have
AROUND = (
    4,
    52,
)  # transformers whose layers checkpoint themselves, so that a unit stands around the checkpoint and not inside (modeling_layers.py)
ALIGNED = 16  # bytes that every parameter begins at, with `use_orig_params` (_flat_param.py _get_aligned_numel)
IN_FLIGHT = 2  # freed units that may wait for the GPU (_limiter_utils.py)


class FSDP1(Engine):
    repeats = False

    def __init__(self, r: Recorder, program: Program) -> None:
        super().__init__(r, program)
        assert program.strategy.fsdp is not None
        self.layout = program.strategy.fsdp
        self.ranks = program.strategy.shards if self.layout.shard else 1
        self.replicas = program.strategy.size("ddp")
        self.around = program.job.version("transformers") >= AROUND
        self.units: dict[str, Flat] = {}
        self.order: list[Flat] = []  # in which forwards ended
        self.firsts: list[Flat] = []  # in which the first forwards began
        self.frees: deque[dict[int, int]] = deque()  # what had been lent when a unit was freed
        self.lent: dict[int, int] = {}
        self.last = self.new = True

    @staticmethod
    def foldable(strategy: Strategy) -> bool:
        """A unit that holds all layers is none of theirs."""
        return strategy.fsdp is None or strategy.fsdp.wrap != "none"

    # ----------------------------------------------------------------------------------------------------------------- the start
    def load(self, body: Body) -> None:
        bring(self, body)
        parts: dict[str, list[Unit]] = {}
        for unit in settled(self, body):
            name = unit.name if unit.span and self.layout.wrap != "none" else ROOT
            parts.setdefault(name, []).append(unit)
        for name, some in parts.items():
            leaves = tuple(leaf for unit in some for leaf in unit.leaves)
            if leaves:
                span = some[0].span if name != ROOT else ""
                self.r.mark("load", span)
                self.units[name] = self.unit(name, span, leaves)
        self.r.mark("load")

    def unit(self, name: str, span: str, leaves: tuple[Tensor, ...]) -> Flat:
        """The shard gets its block; the leaves share one that comes and goes."""
        r, layout, stored = self.r, self.layout, leaves[0].format
        computed = FORMATS[NAMES[layout.param_dtype]] if layout.param_dtype else stored
        reduced = FORMATS[NAMES[layout.reduce_dtype]] if layout.reduce_dtype else computed if layout.param_dtype else stored
        places, count = self.places(leaves, computed)
        shard = -(-count // self.ranks)
        trained = any(leaf.needs for leaf in leaves)
        r.where = span
        block = r.tensor((shard,), stored, "shard", "weights").storage
        storage = self.views(computed.bytes(shard * self.ranks)) if layout.shard or computed is not stored else None
        pieces = tuple(self.cut(leaves, places, shard, stored, block))
        for leaf in leaves:
            leaf.shape, leaf.format, leaf.storage = leaf.shape or (1,), computed, storage or block
            leaf.needs = trained
        whole = Tensor((count,), computed, storage, None, trained)
        whole.name = name
        return Flat(
            name=name, span=span, stored=stored, computed=computed, reduced=reduced, count=count, shard=shard, leaves=leaves, pieces=pieces, whole=whole,
            storage=storage,
        )  # fmt: skip

    def views(self, size: int) -> Lent:
        """What all leaves of a unit share while it is gathered; without shards it is a cast of all."""
        r, stream = self.r, GATHER if self.layout.shard else CAST
        return Lent(size, lambda: r.block(size, "unshard", "communication", stream), r.write, (COMPUTE,))

    def places(self, leaves: Sequence[Tensor], computed: Format) -> tuple[list[int], int]:
        """Where each parameter begins in the flat one, and its size."""
        at, places = 0, []
        step = ALIGNED // computed.block_bytes if self.layout.orig_params else 1
        for leaf in leaves:
            at += -at % step
            places.append(at)
            at += leaf.count
        return places, at + (-at % self.ranks if self.layout.orig_params else 0)

    def cut(self, leaves: Sequence[Tensor], places: Sequence[int], shard: int, stored: Format, block: Storage | None) -> Iterator[Tensor]:
        """What the optimizer steps on: the parts of parameters that lie in this rank's shard, or all of it as one."""
        begin = self.program.strategy.shard * shard if self.layout.shard else 0
        if not self.layout.orig_params:
            whole = Tensor((shard,), stored, block)
            whole.needs = any(leaf.needs for leaf in leaves)
            yield whole
            return
        for leaf, place in zip(leaves, places, strict=True):
            count = min(place + leaf.count, begin + shard) - max(place, begin)
            if count > 0:
                piece = Tensor((count,), stored, block)
                piece.name, piece.needs = leaf.name, leaf.needs
                yield piece

    def spans(self, body: Body) -> Spans:
        out: dict[str, list[Tensor]] = {"": []}
        for unit in self.units.values():
            out.setdefault(unit.span, []).extend(piece for piece in unit.pieces if piece.needs)
        return list(out.items())

    def begin_run(self) -> None:
        """The first forward makes every tensor that is ever gathered, and frees it again (`init_flat_param_attributes`)."""
        r = self.r
        where, r.where = r.where, ""
        for unit in self.units.values():
            mixed = unit.computed is not unit.stored
            sizes = [unit.computed.bytes(unit.shard)] if mixed else []
            if self.layout.shard and unit.storage is not None:
                sizes.append(unit.storage.size)
                sizes += [unit.stored.bytes(unit.shard * self.ranks)] if mixed else []
            for size in sizes:
                r.scratch(size, "empty", "communication")
        r.where, self.new = where, False

    # ------------------------------------------------------------------------------------------------------------------- streams
    def sync(self, stream: int, waits_for: int, behind: int = 0) -> None:
        self.r.write(Sync(stream, waits_for, behind))

    def give(self, storage: Lent) -> None:
        if storage.id >= 0:
            storage.drop()
            for stream in storage.users:
                self.lent[stream] = self.lent.get(stream, 0) + 1

    def limit(self) -> None:
        """Before a gather the program waits for the older of two freed units."""
        if len(self.frees) >= IN_FLIGHT:
            then = self.frees.popleft()
            for stream, lent in self.lent.items():
                self.sync(GATHER, stream, lent - then.get(stream, 0))

    # --------------------------------------------------------------------------------------------------------------------- units
    def unshard(self, unit: Flat) -> None:
        r = self.r
        where, r.where = r.where, r.span
        away = unit.storage is not None and unit.storage.id < 0
        cast: Lent | None = None
        if away and self.layout.shard and unit.computed is not unit.stored:
            cast = self.lend(unit.computed.bytes(unit.shard), "cast", CAST, GATHER)
        self.limit()
        if away and unit.storage is not None:
            unit.storage.take()
            if self.ranks > 1:
                r.comm("all_gather", unit.storage.size, self.ranks, "fsdp")
        if cast is not None:
            self.give(cast)
        r.where = where

    def lend(self, size: int, op: str, stream: int, user: int, part: Part = "communication") -> Lent:
        r = self.r
        made = Lent(size, lambda: r.block(size, op, part, stream), r.write, (user,))
        made.take()
        return made

    def reshard(self, unit: Flat, free: bool) -> None:
        if unit.storage is not None and (free or not self.layout.shard):
            self.give(unit.storage)
        if free:
            self.frees.append(dict(self.lent))
        unit.ahead = False

    def gather(self, unit: Flat) -> None:
        if not unit.ahead:
            self.unshard(unit)
        self.sync(COMPUTE, GATHER)

    # ------------------------------------------------------------------------------------------------------------------- forward
    def begin(self, last: bool) -> None:
        self.last = last or self.layout.sync

    def before(self, name: str, x: Tensor) -> Tensor:
        if name == ROOT:
            self.root()
        unit = self.units.get(name)
        if unit is None or unit.state == PRE_BACKWARD:
            return x
        unit.state = FORWARD
        self.gather(unit)
        unit.due = False
        if unit not in self.firsts:
            self.firsts.append(unit)
        if self.layout.forward_prefetch:
            self.next(unit)
        self.split(unit)
        return x

    def root(self) -> None:
        """The root's own hook, before any other: gradients that the optimizer's parameters have given up are given up."""
        if self.new:
            self.begin_run()
        for unit in self.units.values():
            unit.due = True
            if unit.held and all(piece.grad is None for piece in unit.pieces):
                unit.held.clear()
                unit.whole.grad = None
        self.sync(GATHER, COMPUTE)

    def next(self, unit: Flat) -> None:
        """The order is that of the first forward, which itself does not know it."""
        for other in self.firsts[self.firsts.index(unit) + 1 :][:1]:
            if other.due and not other.ahead:
                self.unshard(other)
                other.ahead = True

    def split(self, unit: Flat) -> None:
        """The parameters as views that the graph knows; their gradients meet in it again."""
        r = self.r
        if not unit.whole.needs:
            return
        node: Node | None = None
        if r.grad:
            out = r.node("split", Tensor(unit.whole.shape, unit.computed, None), (unit.whole,), lambda r, node, g: self.joined(unit, g))
            node = out.node
            assert node is not None
            node.outputs = max(2, len(unit.leaves))
        for slot, leaf in enumerate(unit.leaves):
            leaf.node, leaf.slot = node, slot

    def joined(self, unit: Flat, gradients: dict[int, Tensor]) -> Grads:
        """The flat gradient, beside its parts."""
        r = self.r
        r.where = unit.span
        for slot, leaf in enumerate(unit.leaves):
            if slot not in gradients:
                gradients[slot] = r.tensor(leaf.shape, leaf.format, "zeros", "gradients")
        storage = self.lend(unit.computed.bytes(unit.count), "cat", COMPUTE, REDUCE, "gradients")
        gradients.clear()
        return (Tensor((unit.count,), unit.computed, storage),)

    def after(self, name: str, out: Tensor) -> Tensor:
        unit = self.units.get(name)
        if unit is None or unit.state == PRE_BACKWARD:
            return out
        unit.place = len(self.order) if not unit.place else unit.place
        self.order.append(unit)
        self.reshard(unit, unit.name != ROOT and self.layout.reshard and self.layout.shard)
        unit.state = IDLE
        if not self.r.grad:
            return out
        unit.ran, unit.wanted = False, out.needs
        return gate(self.r, out, lambda: self.pre_backward(unit))

    # ------------------------------------------------------------------------------------------------------------------ backward
    def pre_backward(self, unit: Flat) -> None:
        if unit.ran:
            return
        unit.state = PRE_BACKWARD
        if unit.wanted:
            self.gather(unit)
        unit.wanted = False
        if self.layout.backward_prefetch == "pre":
            self.prefetch(unit)
        unit.ran = True

    def prefetch(self, unit: Flat) -> None:
        if not unit.place:
            return
        other = self.order[unit.place - 1]
        if other.wanted and not other.ahead:
            self.unshard(other)
            other.ahead = True

    def ready(self, leaf: Tensor) -> None:
        """The flat gradient is there: the weights go, and it is reduced."""
        unit = self.units.get(leaf.name)
        if unit is None or leaf is not unit.whole:
            return
        unit.state = POST_BACKWARD
        r = self.r
        where, r.where = r.where, unit.span
        self.reshard(unit, self.layout.shard and (self.last or self.layout.reshard))
        if self.layout.backward_prefetch == "post":
            self.prefetch(unit)
        if self.last:
            self.sync(REDUCE, COMPUTE)
            (self.reduce if self.layout.shard else self.sum)(unit)
        r.where = where

    def reduce(self, unit: Flat) -> None:
        r = self.r
        assert unit.whole.grad is not None
        flat, unit.whole.grad = unit.whole.grad.storage, None
        given: Storage | None = None
        if unit.reduced is not unit.computed:
            given = r.scratch(unit.reduced.bytes(unit.count), "to", "communication", REDUCE)
        if unit.count % self.ranks:
            given = r.scratch(unit.reduced.bytes(unit.shard * self.ranks), "pad", "communication", REDUCE)
        part: Part = "communication" if unit.held else "gradients"  # later ones are added into the first
        summed = self.lend(unit.reduced.bytes(unit.shard), "reduce_scatter", REDUCE, REPLICAS, part)
        r.comm("reduce_scatter", unit.reduced.bytes(unit.shard * self.ranks), self.ranks, "fsdp")
        if self.replicas > 1:
            self.sync(REPLICAS, REDUCE)
            r.comm("all_reduce", unit.reduced.bytes(unit.shard), self.replicas, "ddp")
        else:
            summed.users = ()
        if unit.stored is unit.reduced:
            self.keep(unit, summed)
        else:
            out = r.scratch(unit.stored.bytes(unit.shard), "to", part, REPLICAS if self.replicas > 1 else REDUCE)
            self.give(summed)
            self.keep(unit, out)
        del given
        if isinstance(flat, Lent):
            self.give(flat)

    def sum(self, unit: Flat) -> None:
        """Without shards the flat gradient is summed up where it is, and then in the dtype of the weights."""
        r = self.r
        assert unit.whole.grad is not None
        flat = unit.whole.grad.storage
        r.comm("all_reduce", unit.reduced.bytes(unit.count), self.program.strategy.shards, "fsdp")
        if unit.stored is not unit.computed and isinstance(flat, Lent):
            unit.whole.grad = r.tensor((unit.count,), unit.stored, "to", "gradients")
            self.give(flat)
        unit.held.clear()
        self.keep(unit, unit.whole.grad.storage)

    def keep(self, unit: Flat, out: Storage | None) -> None:
        """The gradient of the shard, unless one is there that it was added to."""
        if unit.held:
            return
        unit.held.append(out)
        for piece in unit.pieces:
            if piece.needs:
                piece.grad = Tensor(piece.shape, unit.stored, out)

    def finish(self) -> None:
        if self.last:
            self.sync(COMPUTE, REDUCE)
            if self.replicas > 1:
                self.sync(COMPUTE, REPLICAS)
        for unit in self.units.values():
            if unit.storage is not None and unit.storage.id >= 0 and (self.last or self.layout.reshard):
                if self.r.span != unit.span:
                    self.r.mark("backward", unit.span, self.r.at)
                self.reshard(unit, True)
            unit.ran = unit.wanted = unit.ahead = False
            unit.place, unit.state = None, IDLE
        self.order.clear()
        if self.r.span:
            self.r.mark("backward", "", self.r.at)


ENGINE = FSDP1
