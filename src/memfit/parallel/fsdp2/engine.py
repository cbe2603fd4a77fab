"""torch's FSDP2 (`fully_shard`), with replicas beside it HSDP (torch 2.13
torch/distributed/fsdp/_fully_shard/: _fsdp_param_group.py, _fsdp_collectives.py, _fsdp_param.py,
_fsdp_state.py).

A group's weights are gathered into one buffer on a stream of its own and copied out of it,
parameter by parameter; the buffer of the forward stays until the next group's was copied out, so
that three buffers stand side by side. Gradients of a group are copied into the input of a
reduce-scatter, which stays until the next group's; its output is the gradient of all shards of the
group, or is cast to it. The whole model never was on the GPU: it is built on the meta device, or
sharded on the host. Left out: buffers in NCCL's or symmetric memory, parameters sharded along
another dimension, fp8 extensions, ignored parameters.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from memfit.formats import FORMATS, FP32, UINT8, Format
from memfit.lazy_dataclass import dataclass
from memfit.lower.engine import (
    EMBED,
    ROOT,
    TAIL,
    Engine,
    Unit,
    Weights,
    gate,
    known_as_parameters,
)
from memfit.lower.optimize import Spans
from memfit.lower.recorder import Recorder
from memfit.lower.shards import (
    GATHER,
    REDUCE,
    REPLICAS,
    Param,
    bring,
    packed_weights,
    settle,
    settled,
    shard,
)
from memfit.lower.tensors import Storage, Tensor
from memfit.parallel.expert.check import stacks
from memfit.program import Program
from memfit.strategy import NAMES, Strategy
from memfit.tape import Part

if TYPE_CHECKING:
    from memfit.lower.body import Body

# transformers that checkpoints `forward`, so that a layer's hooks stand around it
# (modeling_layers.py; 4.57 checkpoints `__call__`)
OUTSIDE = (5, 23)
IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD = "idle", "forward", "pre-backward", "post-backward"


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """Parameters that are gathered and reduced together."""

    name: str
    span: str
    reshard: bool
    ranks: int  # that its weights are sharded over
    inside: bool = False  # within a layer: experts that are spread
    params: list[Param] = field(default_factory=list)
    state: str = IDLE
    result: list[Storage | None] = field(
        default_factory=list
    )  # the gathered buffer, until it is copied out
    unsharded: bool = False
    kept: list[Storage | None] = field(
        default_factory=list
    )  # shards over fewer ranks, from the end of the forward on
    added: dict[int, Tensor] = field(
        default_factory=dict
    )  # gradients that wait for a reduction, in its dtype
    places: list[int] = field(default_factory=list)  # in the order of the forward
    summed: Storage | None = None  # what the replicas added up, until the backward is over

    @property
    def mesh(self) -> str:
        """The communicator of its ranks."""
        return "efsdp" if self.inside else "fsdp"


class FSDP2(Engine):
    repeats = False
    gathers, reduces, replicates = GATHER, REDUCE, REPLICAS  # streams

    def __init__(self, r: Recorder, program: Program) -> None:
        super().__init__(r, program)
        assert program.strategy.fsdp is not None
        self.layout = program.strategy.fsdp
        # without prefetching by hand both ways hold the same, and inside one layer can stand for
        # all
        self.around = program.job.version("transformers") >= OUTSIDE and self.layout.prefetch > 1
        self.ranks = program.strategy.shards
        self.replicas = program.strategy.size("ddp")
        self.experts = stacks(program) if program.spread else frozenset()
        self.groups: dict[str, Group] = {}
        self.opens: dict[str, Group] = {}  # by the module that a group's forward begins with,
        self.closes: dict[str, Group] = {}  # and ends with
        self.layers: list[Group] = []
        self.order: list[Group] = []  # in which forwards ended
        self.before_last: list[Storage | None] = []  # the buffer of the group that ran before
        self.inputs: list[Storage | None] = []  # of reduce-scatters under way
        self.last = True

    @staticmethod
    def foldable(strategy: Strategy) -> bool:
        """A layer that gathers others than its neighbour, or a unit that holds all layers, is not
        like the next one."""
        fsdp = strategy.fsdp
        return fsdp is None or (fsdp.prefetch <= 1 and fsdp.wrap != "none")

    # ----------------------------------------------------------------------------------- the start
    def load(self, body: Body) -> None:
        wrap, tied = self.layout.wrap, self.program.model.tied
        bring(self, body)
        ignored = frozenset() if self.layout.packed else packed_weights(body)
        for unit in settled(self, body):
            whole = self.group_of(unit, wrap, tied)
            for leaf in unit.leaves:
                group = self.spread(unit, leaf) or whole
                if id(leaf) in ignored:
                    settle(self.r, leaf, "weights")
                else:
                    group.params.append(self.param(leaf, group))
        self.groups = {name: group for name, group in self.groups.items() if group.params}
        self.layers = [group for group in self.groups.values() if group.span and not group.inside]
        ends = {EMBED: TAIL} if tied else {}
        for name, group in self.groups.items():
            self.opens[name] = self.closes[ends.get(name, name)] = group

    def group_of(self, unit: Unit, wrap: str, tied: bool) -> Group:
        """Layers are groups; what is beside them belongs to the root, or embedding and head are
        groups of their own, one if they are tied. The last group and the root stay gathered after
        the forward."""
        name, reshard = unit.name, self.layout.reshard
        if wrap == "none" or (unit.span == "" and (wrap == "layers" or name == ROOT)):
            name, reshard = ROOT, False
        elif name == TAIL or (name == EMBED and tied):
            name, reshard = (EMBED if tied else TAIL), False
        if name not in self.groups:
            self.groups[name] = Group(name=name, span=unit.span, reshard=reshard, ranks=self.ranks)
        return self.groups[name]

    def spread(self, unit: Unit, leaf: Tensor) -> Group | None:
        """A layer's experts that are spread are a group of their own, over the ranks that hold the
        same ones (transformers 5.23 distributed/fsdp.py apply_fully_sharded_data_parallelism)."""
        if leaf.name not in self.experts:
            return None
        name = f"{unit.span}.{leaf.name.rpartition('.')[0]}"
        if name not in self.groups:
            ranks = self.program.strategy.expert_data // self.replicas
            self.groups[name] = Group(
                name=name, span=unit.span, reshard=True, ranks=ranks, inside=True
            )
        return self.groups[name]

    def param(self, leaf: Tensor, group: Group) -> Param:
        """The shard of a leaf; the leaf takes and drops its block from here on, in the dtype that
        is computed in."""
        r, stored = self.r, leaf.format
        leaf.shape = leaf.shape or (1,)
        if self.layout.offload:
            own = Tensor(leaf.shape, stored, None)
            own.name, own.needs = leaf.name, leaf.needs
        else:
            r.where = group.span
            own = shard(
                r,
                leaf,
                group.ranks,
                self.program.strategy.expert_replica % group.ranks
                if group.inside
                else self.program.strategy.shard,
            )
        if self.layout.param_dtype and stored is not UINT8:
            leaf.format = FORMATS[NAMES[self.layout.param_dtype]]
        rows = -(-leaf.shape[0] // group.ranks) * group.ranks
        param = Param(leaf=leaf, shard=own, stored=stored, rows=rows)
        leaf.storage = r.elastic(leaf.format.bytes(param.whole), "unshard", "communication")
        return param

    def spans(self, body: Body) -> Spans:
        """The shards, by the span of their unit; those on the host step there."""
        if self.layout.offload:
            return []
        out: dict[str, list[Tensor]] = {"": []}
        for group in self.groups.values():
            out.setdefault(group.span, []).extend(
                param.shard for param in group.params if param.leaf.needs
            )
        return list(out.items())

    def weights(self, body: Body) -> Weights:
        return known_as_parameters(body)

    # ------------------------------------------------------------------------------------- forward
    def begin(self, last: bool) -> None:
        self.last = last

    def before(self, name: str, x: Tensor) -> Tensor:
        group = self.opens.get(name)
        if group is None or group.state == PRE_BACKWARD:
            if group is not None and not group.unsharded:
                self.unshard(group)
                self.copy_out(group)
            return x
        group.state = FORWARD
        self.unshard(group)
        self.copy_out(group)
        self.ahead(group)
        return gate(self.r, x, lambda: self.post_backward(group))

    def ahead(self, group: Group) -> None:
        """Layers that the user has gathered with this one."""
        if self.layout.prefetch and group in self.layers:
            at = self.layers.index(group)
            for other in self.layers[at + 1 : at + 1 + self.layout.prefetch]:
                self.unshard(other)

    def after(self, name: str, out: Tensor) -> Tensor:
        group = self.closes.get(name)
        if group is not None and group.state != PRE_BACKWARD:
            out = self.complete(group, out)
        if name == ROOT:
            for other in [one for one in self.groups.values() if one.state == FORWARD]:
                out = self.complete(other, out)
            self.before_last.clear()
        return out

    def complete(self, group: Group, out: Tensor) -> Tensor:
        """A group's forward is over; with the root's so is that of a group of which not all modules
        ran: a fused loss never calls the head, but multiplies by its weight
        (`_force_complete_incomplete_states`)."""
        if self.r.phase != "backward":
            self.reshard(group, forward=True)
            if self.r.phase == "forward":
                group.places.append(len(self.order))
                self.order.append(group)
        group.state = IDLE
        return gate(self.r, out, lambda: self.pre_backward(group))

    def unshard(self, group: Group) -> None:
        """All-gather: shards that are cast go through one flat tensor (`foreach_copy`), offloaded
        ones come one by one; the input is a view of the output."""
        if group.result or group.unsharded or group.ranks == 1:
            return
        r, ranks = self.r, group.ranks
        if group.kept:
            ranks = self.layout.reshard_to
        where, r.where = r.where, r.span
        held: list[Storage | None] = []
        if self.layout.offload:
            for param in group.params:
                there = r.scratch(
                    param.stored.bytes(param.whole // ranks),
                    "to_device",
                    "communication",
                    self.gathers,
                )
                cast = there
                if param.stored is not param.leaf.format:
                    cast = r.scratch(
                        param.leaf.format.bytes(param.whole // ranks),
                        "cast",
                        "communication",
                        self.gathers,
                    )
                held.append(cast)
                del there, cast
        else:
            cast_in = sum(
                param.leaf.format.bytes(param.whole // ranks)
                for param in group.params
                if param.stored is not param.leaf.format
            )
            held.append(r.scratch(cast_in, "cast", "communication", self.gathers))
        size = sum(param.leaf.format.bytes(param.whole) for param in group.params)
        group.result = [r.scratch(size, "all_gather", "communication", self.gathers)]
        r.comm("all_gather", size, ranks, group.mesh, self.gathers)
        del held
        r.where = where

    def copy_out(self, group: Group) -> None:
        if group.unsharded or not (group.result or group.ranks == 1):
            return
        r = self.r
        where, r.where = r.where, r.span
        before, self.before_last = self.before_last, []
        if group.state != FORWARD:
            self.before_last, before = before, []
        for param in group.params:
            param.storage.take()
            if group.ranks == 1 and param.stored is not param.leaf.format:  # copied from a cast
                cast = r.scratch(param.leaf.format.bytes(param.whole), "cast", "communication")
                del cast
        group.unsharded = True
        group.kept.clear()
        if group.state == FORWARD:  # freed when the next one is copied out
            self.before_last = group.result
        group.result = []
        before.clear()
        r.where = where

    def reshard(self, group: Group, *, forward: bool) -> None:
        if not group.unsharded or (forward and not group.reshard):
            return
        r = self.r
        where, r.where = r.where, r.span
        for param in group.params:
            if forward and self.layout.reshard_to and not group.inside:
                size = param.leaf.format.bytes(param.whole) // self.layout.reshard_to
                group.kept.append(r.scratch(size, "reshard", "communication"))
            param.storage.drop()
        group.unsharded = False
        r.where = where

    # ------------------------------------------------------------------------------------ backward
    def pre_backward(self, group: Group) -> None:
        if group.state == PRE_BACKWARD:
            return
        group.state = PRE_BACKWARD
        self.unshard(group)
        self.copy_out(group)
        if not group.places:
            return
        at = group.places.pop()
        if self.layout.prefetch and group in self.layers:
            place = self.layers.index(group)
            others = self.layers[max(0, place - self.layout.prefetch) : place]
        else:
            others = self.order[max(0, at - 1) : at]
        for other in reversed(others):
            self.unshard(other)

    def post_backward(self, group: Group) -> None:
        """The gathered weights go, then the earlier input of a reduction, then the gradients are
        copied and reduced."""
        r = self.r
        where, r.where = r.where, r.span
        group.state = POST_BACKWARD
        for param in group.params:
            if id(param) in group.added:
                param.leaf.grad = None
        trained = [param for param in group.params if param.leaf.needs]
        if self.last or self.layout.sync:
            grads: list[Tensor] = []
            arrived: list[Param] = []
            for param in trained:
                grad = self.own_rows(param, group.added.pop(id(param), None) or param.leaf.grad)
                param.leaf.grad = None
                if grad is not None:
                    grads.append(grad)
                    arrived.append(param)
                del grad
            self.reshard(group, forward=False)
            self.inputs.clear()
            if arrived:
                self.reduce(group, arrived, grads)
        else:
            self.reshard(group, forward=False)
            self.widen(group, trained)
        r.where = where

    def own_rows(self, param: Param, grad: Tensor | None) -> Tensor | None:
        """Of a gradient that is whole where tensor parallelism splits the parameter, a copy of this
        rank's rows (_fsdp_param.py _get_grad_inner_tensor)."""
        if grad is None or grad.shape[0] <= param.leaf.shape[0]:
            return grad
        return self.r.tensor(param.leaf.shape, grad.format, "clone", "gradients")

    def widen(self, group: Group, trained: list[Param]) -> None:
        """Whole gradients wait for the micro-batch that is reduced, in the dtype of the
        reduction."""
        format = self.reduction(trained[0].leaf.format) if trained else FP32
        for param in trained:
            if param.leaf.grad is not None and param.leaf.grad.format is not format:
                group.added[id(param)] = self.r.tensor(
                    param.leaf.grad.shape, format, "to", "gradients"
                )
                param.leaf.grad = None

    def reduction(self, format: Format) -> Format:
        """The dtype of a reduction; the one that is computed in anyway changes nothing."""
        reduce = self.layout.reduce_dtype
        return FORMATS[NAMES[reduce]] if reduce and reduce != self.layout.param_dtype else format

    def reduce(self, group: Group, trained: list[Param], grads: list[Tensor]) -> None:
        r, stored = self.r, trained[0].stored
        format = self.reduction(grads[0].format)
        count = sum(param.whole for param in trained)
        self.inputs.append(r.scratch(format.bytes(count), "reduce_scatter", "communication"))
        grads.clear()
        size = format.bytes(count // group.ranks)
        kept = (
            not self.layout.offload and trained[0].shard.grad is None
        )  # else it is added to what is there
        part: Part = "gradients" if kept else "communication"
        out = r.scratch(
            size, "reduce_scatter", part if format is stored else "communication", self.reduces
        )
        if group.ranks > 1:
            r.comm("reduce_scatter", format.bytes(count), group.ranks, group.mesh, self.reduces)
        else:  # a copy of what it was divided into
            divided = r.scratch(size, "div", "communication", self.reduces)
            del divided
        stream = self.reduces
        if self.replicas > 1:
            r.comm("all_reduce", size, self.replicas, "ddp", self.replicates)
            group.summed, stream = out, self.replicates
        if format is not stored:
            out = r.scratch(stored.bytes(count // group.ranks), "to", part, stream)
        if kept:
            for param in trained:
                param.shard.grad = Tensor(param.shard.shape, stored, out)

    def finish(self) -> None:
        """The root's final callback: groups whose input had no gradient, then everything that was
        kept for the streams' sake."""
        r = self.r
        for group in sorted(self.groups.values(), key=lambda one: one.name != ROOT):
            if group.state != POST_BACKWARD:
                self.at(group)
                self.post_backward(group)
            group.state = IDLE
            group.places.clear()
        for group in self.groups.values():
            if group.summed is not None or group.result:
                self.at(group)
                group.summed = None
                group.result = []
        self.order.clear()
        if r.span:
            r.mark("backward", "", r.at)
        self.inputs.clear()

    def at(self, group: Group) -> None:
        if self.r.span != group.span:
            self.r.mark("backward", group.span, self.r.at)


ENGINE = FSDP2
