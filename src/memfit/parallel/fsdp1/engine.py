"""torch's FSDP1 (`FullyShardedDataParallel`): every unit's parameters are views of one flat tensor
(torch 2.13 torch/distributed/fsdp/_flat_param.py, _runtime_utils.py; of 2.2 to 2.13 alike).

The all-gather writes into the flat tensor itself, on a stream of its own; the views are outputs of
one `split`, whose backward puts all gradients of the unit into a flat one while they still stand.
What is freed is kept back for the streams that used it (`record_stream`), and at most two freed
units wait: then the program itself waits (`limit_all_gathers`). Left out: a CPU that is slower than
the GPU, for which nothing waits; `ignored_modules`, communication hooks, optimizers in the
backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memfit.formats import BF16, FORMATS, FP32, Format
from memfit.lower.engine import ROOT, Engine, Leaves, Weights, gate
from memfit.lower.engine import leaves as leaves_of
from memfit.lower.optimize import Spans
from memfit.lower.recorder import Recorder
from memfit.lower.shards import (
    COMPUTE,
    GATHER,
    REDUCE,
    bring,
    packed_weights,
    settle,
    settled,
)
from memfit.lower.tensors import Grads, Node, Storage, Tensor
from memfit.parallel.flat_parameters import (
    FORWARD,
    IDLE,
    POST_BACKWARD,
    PRE_BACKWARD,
    Flat,
    Lent,
    adapter,
    opaque,
    ordered,
    scales,
    values,
)
from memfit.parallel.fsdp1.wrap import Host, arrive, inner_first, runs_ahead
from memfit.program import Program
from memfit.strategy import NAMES, Strategy
from memfit.tape import Part, Sync

if TYPE_CHECKING:
    from memfit.lower.body import Body

CAST, REPLICAS = (
    3,
    4,
)  # the streams that cast shards before they are gathered, and that add up what replicas have
AROUND = (
    4,
    52,
    # transformers whose layers checkpoint themselves, so that a unit stands around the checkpoint
    # and not inside (modeling_layers.py)
)
# bytes that every parameter begins at, with `use_orig_params` (_flat_param.py _get_aligned_numel)
ALIGNED = 16
UPCAST = (0, 30)  # accelerate that does so
IN_FLIGHT = 2  # freed units that may wait for the GPU (_limiter_utils.py)


class FSDP1(Engine):
    repeats = False

    def __init__(self, r: Recorder, program: Program) -> None:
        super().__init__(r, program)
        assert program.strategy.fsdp is not None
        self.layout = program.strategy.fsdp
        self.ranks = program.strategy.shards if self.layout.shard else 1
        self.replicas = program.strategy.size("ddp")
        self.around = self.layout.checkpoint_inside or program.job.version("transformers") >= AROUND
        self.inner = program.adapter is not None and self.layout.adapters == "units"
        self.inside: dict[int, str] = {}  # adapters' matrices that are units
        self.host = Host(r, program.strategy.rank > 0 and runs_ahead(program))
        self.units: dict[str, Flat] = {}
        self.shown: dict[int, Format] = {}
        self.ignored: list[tuple[str, Tensor]] = []  # adapters that stay whole, with their spans
        self.scales: list[Storage | None] = []
        self.order: list[Flat] = []  # in which forwards ended
        self.firsts: list[Flat] = []  # in which the first forwards began
        self.frees: deque[dict[int, int]] = deque()  # what had been lent when a unit was freed
        self.lent: dict[int, int] = {}
        self.last = self.new = True

    # gathers wait for units that were freed two layers ago: only the third layer is like those
    # behind it
    steady = False

    @staticmethod
    def foldable(strategy: Strategy) -> bool:
        """A unit that holds all layers is none of theirs."""
        return strategy.fsdp is None or strategy.fsdp.wrap != "none"

    @staticmethod
    def distinct_ranks(
        program: Program, *, every: bool, lightest: bool
    ) -> tuple[tuple[int, int], ...] | None:
        """Live bytes differ little; what wrapping leaves in the cache does."""
        strategy = program.strategy
        if not every or len(strategy.distinct()) > 1 or not runs_ahead(program):
            return None
        others = ((1, strategy.ranks - 1),)
        return ((0, 1), *others) if lightest else others

    # ----------------------------------------------------------------------------------- the start
    def load(self, body: Body) -> None:
        bring(self, body)
        found: dict[str, list[Tensor]] = {}
        spans: dict[str, str] = {}
        outside = frozenset() if self.layout.packed else packed_weights(body)
        for unit in settled(self, body):
            layer = unit.name if unit.span and self.layout.wrap != "none" else ROOT
            for leaf in ordered(unit.leaves):
                if id(leaf) in outside or (adapter(leaf) and self.layout.adapters == "ignored"):
                    settle(self.r, leaf, "weights")
                    self.ignored.append((unit.span, leaf))
                    continue
                self.beside(leaf, unit.span)
                name = f"{unit.span}.{leaf.name}" if adapter(leaf) and self.inner else layer
                if name != layer:
                    self.inside[id(leaf)] = name
                found.setdefault(name, []).append(leaf)
                spans[name] = unit.span if layer != ROOT else ""
        for leaves in found.values():
            leaves.sort(
                key=lambda leaf: leaf.name not in self.r.shared
            )  # a tied table is the embedding's, and so the first
        made: dict[str, Flat] = {}
        for name in inner_first(found, spans):
            self.r.mark("load", spans[name])
            made[name] = self.unit(name, spans[name], tuple(found[name]))
        self.host.wait()
        self.units = {name: made[name] for name in found}
        self.r.mark("load")

    def beside(self, leaf: Tensor, span: str) -> None:
        """GPTQ's scales are buffers, of which every rank has all; what is packed can be made
        parameters, as fms-acceleration does (fms_acceleration_peft autogptq_utils.py)."""
        size = leaf.count // leaf.format.block * scales(leaf.format)
        if size:
            self.r.where = span
            self.scales.append(self.r.scratch(size, "scales", "weights"))

    def unit(self, name: str, span: str, leaves: tuple[Tensor, ...]) -> Flat:
        """The shard gets its block; the leaves share one that comes and goes. Under mixed precision
        accelerate makes what is trained fp32 (accelerator.py prepare_model, from 0.30 on)."""
        r, layout, job = self.r, self.layout, self.program.job
        trained = any(leaf.needs for leaf in leaves)
        stored = next((leaf.format for leaf in leaves if not opaque(leaf.format)), BF16)
        first = stored
        if trained and job.autocast and job.hugging and job.version("accelerate") >= UPCAST:
            stored = FP32
        computed = FORMATS[NAMES[layout.param_dtype]] if layout.param_dtype else stored
        reduced = (
            FORMATS[NAMES[layout.reduce_dtype]]
            if layout.reduce_dtype
            else computed
            if layout.param_dtype
            else stored
        )
        places, count = self.places(leaves, first, computed)
        shard = -(-count // self.ranks)
        r.where = span
        arrived = arrive(
            self.host, leaves, first, count if layout.shard else 0, self.program.strategy.shards
        )
        block = r.tensor((shard,), first, "shard", "weights").storage
        arrived.clear()
        if layout.offload:
            block = None
        elif stored is not first:
            r.mark("prepare", span)
            block = r.tensor((shard,), stored, "to", "weights").storage
        storage = (
            self.views(computed.bytes(shard * self.ranks))
            if layout.shard or computed is not stored or layout.offload
            else None
        )
        pieces = tuple(self.cut(leaves, places, shard, stored, block))
        for leaf in leaves:
            leaf.shape, leaf.storage, leaf.needs = leaf.shape or (1,), storage or block, trained
            if not opaque(leaf.format):
                leaf.format = computed
            if adapter(leaf) and self.inner and self.layout.orig_params:
                self.shown[id(leaf)] = stored
        whole = Tensor((count,), computed, storage, None, trained)
        whole.name = name
        return Flat(
            name=name,
            span=span,
            stored=stored,
            computed=computed,
            reduced=reduced,
            count=count,
            shard=shard,
            leaves=leaves,
            pieces=pieces,
            whole=whole,
            storage=storage,
        )

    def views(self, size: int) -> Lent:
        """What all leaves of a unit share while it is gathered; without shards it is a cast
        of all."""
        r, stream = self.r, GATHER if self.layout.shard else CAST
        return Lent(
            size, lambda: r.block(size, "unshard", "communication", stream), r.write, (COMPUTE,)
        )

    def places(
        self, leaves: Sequence[Tensor], stored: Format, computed: Format
    ) -> tuple[list[int], int]:
        """Where each parameter begins in the flat one, and its size; packed weights are taken for
        numbers of the others' format."""
        at, places = 0, []
        step = ALIGNED // computed.block_bytes if self.layout.orig_params else 1
        for leaf in leaves:
            at += -at % step
            places.append(at)
            at += values(leaf, stored)
        return places, at + (-at % self.ranks if self.layout.orig_params else 0)

    def cut(
        self,
        leaves: Sequence[Tensor],
        places: Sequence[int],
        shard: int,
        stored: Format,
        block: Storage | None,
    ) -> Iterator[Tensor]:
        """What the optimizer steps on: the parts of parameters that lie in this rank's shard, or
        all of it as one."""
        begin = self.program.strategy.shard * shard if self.layout.shard else 0
        if not self.layout.orig_params:
            whole = Tensor((shard,), stored, block)
            whole.needs = any(leaf.needs for leaf in leaves)
            yield whole
            return
        for leaf, place in zip(leaves, places, strict=True):
            count = min(place + values(leaf, stored), begin + shard) - max(place, begin)
            if count > 0:
                piece = Tensor((count,), stored, block)
                piece.name, piece.needs = leaf.name, leaf.needs
                yield piece

    def spans(self, body: Body) -> Spans:
        out: dict[str, list[Tensor]] = {"": []}
        for unit in self.units.values():
            pieces = () if self.layout.offload else unit.pieces  # those step on the host
            out.setdefault(unit.span, []).extend(piece for piece in pieces if piece.needs)
        for span, leaf in self.ignored:
            out[span] += [leaf] if leaf.needs else []
        return list(out.items())

    def weights(self, body: Body) -> Weights:
        """What modules see are views of the flat parameter."""
        own, first = (
            frozenset(id(leaf) for _, leaf in self.ignored),
            {id(unit.leaves[0]) for unit in self.units.values()},
        )
        return Weights(parameters=own, leaves=frozenset(map(id, leaves_of(body))) - first)

    def begin_run(self) -> None:
        """The first forward makes every tensor that is ever gathered, and frees it again
        (`init_flat_param_attributes`)."""
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

    def seen(self, leaf: Tensor) -> Format:
        """While it is not gathered an adapter's matrix is its shard, or (`use_orig_params` off) the
        view that it was before."""
        return self.shown.get(id(leaf), leaf.format)

    # ------------------------------------------------------------------------------------- streams
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

    # --------------------------------------------------------------------------------------- units
    def unshard(self, unit: Flat) -> None:
        r = self.r
        where, r.where = r.where, r.span
        away = unit.storage is not None and unit.storage.id < 0
        cast: Lent | None = None
        holds = self.layout.offload and self.layout.orig_params and unit.computed is unit.stored
        if self.layout.shard and (away or holds):
            cast = self.brought(unit)
        self.limit()
        if away and unit.storage is not None:
            unit.storage.take()
            if self.ranks > 1:
                r.comm("all_gather", unit.storage.size, self.ranks, "fsdp", GATHER)
        if holds and cast is not None:
            cast.users = cast.users if away else ()
            self.unseen(unit)
            unit.brought = cast
        elif cast is not None:
            self.give(cast)
        r.where = where

    def brought(self, unit: Flat) -> Lent | None:
        """What is gathered, where it is not the shard itself: a cast of it, or of what came from
        the host."""
        mixed = unit.computed is not unit.stored
        here = (
            self.lend(unit.stored.bytes(unit.shard), "to_device", CAST, GATHER)
            if self.layout.offload
            else None
        )
        if not mixed:
            return here
        cast = self.lend(unit.computed.bytes(unit.shard), "cast", CAST, GATHER)
        if here is not None:
            here.users = ()
        return cast

    def lend(
        self, size: int, op: str, stream: int, user: int, part: Part = "communication"
    ) -> Lent:
        r = self.r
        made = Lent(size, lambda: r.block(size, op, part, stream), r.write, (user,))
        made.take()
        return made

    def unseen(self, unit: Flat) -> None:
        if unit.brought is not None:
            self.give(unit.brought)
            unit.brought = None

    def reshard(self, unit: Flat, free: bool) -> None:
        if (
            self.layout.reshard or self.r.phase != "forward"
        ):  # else the parameters' views stay as they are (`skip_use_sharded_views`)
            self.unseen(unit)
        if unit.storage is not None and (free or not self.layout.shard):
            self.give(unit.storage)
        if free:
            self.frees.append(dict(self.lent))
        unit.ahead = False

    def gather(self, unit: Flat) -> None:
        if not unit.ahead:
            self.unshard(unit)
        self.sync(COMPUTE, GATHER)

    # ------------------------------------------------------------------------------------- forward
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
        if unit.whole.needs or unit.watched is not None or not (self.r.grad and x.needs):
            return x
        unit.watched = x if x.node is None else x.detach()
        if x.node is not None:
            unit.watched.storage = None
        return gate(self.r, x, lambda: self.post_backward(unit))

    def enter(self, leaves: Leaves, x: Tensor) -> Tensor:
        name = self.inside.get(id(leaves[0]))
        return x if name is None else self.before(name, x)

    def leave(self, leaves: Leaves, out: Tensor) -> Tensor:
        name = self.inside.get(id(leaves[0]))
        return out if name is None else self.after(name, out)

    def root(self) -> None:
        """The root's own hook, before any other: gradients that the optimizer's parameters have
        given up are given up."""
        if self.new:
            self.begin_run()
        for unit in self.units.values():
            unit.due = True
            if unit.held and all(piece.grad is None for piece in unit.pieces):
                self.at(unit)
                unit.held.clear()
                unit.whole.grad = None
        self.r.leave()
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
            out = r.node(
                "split",
                Tensor(unit.whole.shape, unit.computed, None),
                (unit.whole,),
                lambda r, node, g: self.joined(unit, g),
            )
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

    # ------------------------------------------------------------------------------------ backward
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
        self.post_backward(unit)
        if self.last:
            where, self.r.where = self.r.where, unit.span
            self.sync(REDUCE, COMPUTE)
            (self.reduce if self.layout.shard else self.sum)(unit)
            self.r.where = where

    def post_backward(self, unit: Flat) -> None:
        """Of a unit that is not trained, when its input has its gradient."""
        unit.state = POST_BACKWARD
        where, self.r.where = self.r.where, unit.span
        self.reshard(unit, self.layout.shard and (self.last or self.layout.reshard))
        if self.layout.backward_prefetch == "post":
            self.prefetch(unit)
        self.r.where = where

    def reduce(self, unit: Flat) -> None:
        r = self.r
        assert unit.whole.grad is not None
        flat, unit.whole.grad = unit.whole.grad.storage, None
        given: Storage | None = None
        if unit.reduced is not unit.computed:
            given = r.scratch(unit.reduced.bytes(unit.count), "to", "communication", REDUCE)
        if unit.count % self.ranks:
            given = r.scratch(
                unit.reduced.bytes(unit.shard * self.ranks), "pad", "communication", REDUCE
            )
        part: Part = (
            "communication" if unit.held or self.layout.offload else "gradients"
        )  # later ones are added into the first
        summed = self.lend(unit.reduced.bytes(unit.shard), "reduce_scatter", REDUCE, REPLICAS, part)
        r.comm(
            "reduce_scatter",
            unit.reduced.bytes(unit.shard * self.ranks),
            self.ranks,
            "fsdp",
            REDUCE,
        )
        if self.replicas > 1:
            self.sync(REPLICAS, REDUCE)
            r.comm("all_reduce", unit.reduced.bytes(unit.shard), self.replicas, "ddp", REDUCE)
        else:
            summed.users = ()
        if unit.stored is unit.reduced:
            self.keep(unit, summed)
        else:
            out = r.scratch(
                unit.stored.bytes(unit.shard), "to", part, REPLICAS if self.replicas > 1 else REDUCE
            )
            self.give(summed)
            self.keep(unit, out)
        del given
        if isinstance(flat, Lent):
            self.give(flat)

    def sum(self, unit: Flat) -> None:
        """Without shards the flat gradient is summed up where it is, and then in the dtype of the
        weights."""
        r = self.r
        assert unit.whole.grad is not None
        flat = unit.whole.grad.storage
        r.comm(
            "all_reduce",
            unit.reduced.bytes(unit.count),
            self.program.strategy.shards,
            "fsdp",
            REDUCE,
        )
        if unit.stored is not unit.computed and isinstance(flat, Lent):
            unit.whole.grad = r.tensor((unit.count,), unit.stored, "to", "gradients")
            self.give(flat)
        unit.held.clear()
        self.keep(unit, unit.whole.grad.storage)

    def keep(self, unit: Flat, out: Storage | None) -> None:
        """The gradient of the shard, unless one is there that it was added to."""
        if self.layout.offload:  # copied to the host, and there until the backward is over
            unit.saved = out
            return
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
            whole = (
                unit.storage is not None
                and unit.storage.id >= 0
                and (self.last or self.layout.reshard)
            )
            if whole or unit.watched is not None or unit.saved is not None:
                self.at(unit)
            if whole:
                self.reshard(unit, True)
            unit.ran = unit.wanted = unit.ahead = False
            unit.watched = unit.saved = None
            unit.place, unit.state = None, IDLE
        self.order.clear()
        self.r.leave()

    def at(self, unit: Flat) -> None:
        """What goes is the unit's."""
        if self.r.span != unit.span:
            self.r.mark(self.r.phase, unit.span, self.r.at)


ENGINE = FSDP1
