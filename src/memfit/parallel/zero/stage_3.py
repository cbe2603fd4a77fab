"""DeepSpeed's ZeRO-3 (deepspeed 0.19.8 runtime/zero/stage3.py, parameter_offload.py,
partition_parameters.py).

Every parameter is cut into equal parts, the trained ones' of a rank lie in one buffer; modules
gather what they need and give it up (see `coordinator`). Gradients go through one bucket that is
always there; what a full bucket leaves of them after the sum over the ranks goes into a buffer of
this rank's parts that is always there as well. The model is built part by part (`zero.Init`, as
transformers does where it knows of ZeRO-3 before it loads), and never was on one GPU.

Modules are linear layers, norms, embeddings and what holds them; other parameters (stacks of
experts, say) are gathered with their layer. Left out: modules without parameters inside these
(activations), which only ask for what comes next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.formats import FP32
from memfit.libraries.trl.check import head_of
from memfit.lower.engine import ROOT, TAIL, Leaves, module_leaves, silently
from memfit.lower.engine_hooks import AGAIN, PAST
from memfit.lower.optimize import Stepper
from memfit.lower.recorder import Recorder
from memfit.lower.shards import COMPUTE, REDUCE, settled
from memfit.lower.tensors import Storage, Tensor
from memfit.parallel.zero.coordinator import AWAY, HERE, Coordinator, Module, Param
from memfit.parallel.zero.engine import ZeRO, norm, stepper_of
from memfit.parallel.zero.zeropp import second
from memfit.program import Program
from memfit.tape import Trim

if TYPE_CHECKING:
    from memfit.lower.body import Body


AT_ONCE = 250_000_000  # values that a norm is taken of (_constant_buffered_norm2)


class ZeRO3(ZeRO):
    inner = gates = own_products = True
    casts_adapters = False  # nothing is cast where the model was made in parts
    steps = 3  # the first pass is learnt from, the second gathers ahead for the first time

    def __init__(self, r: Recorder, program: Program) -> None:
        super().__init__(r, program)
        self.coordinator = Coordinator(r, self.layout)
        self.params: dict[int, Param] = {}
        self.modules: dict[
            tuple[str, Leaves], Module
        ] = {}  # by where they are told of, and with what
        self.wholes: dict[str, Module] = {}  # what is gathered with a layer, or an end of the model
        self.direct: tuple[
            Param, ...
        ] = ()  # what the loss multiplies by itself, until it is the whole model's
        self.groups_of: list[list[Param]] = []
        self.masters: list[Tensor] = []
        self.kept: list[Storage | None] = []  # parts, buckets: there all the time
        self.stored = self.format  # what trained parts are in
        self.inside = ""  # which of a layer's holders of modules runs
        self.saved: dict[Param, Storage] = {}  # blocks that a recomputation's graph keeps,
        self.matrices: frozenset[int] = frozenset()  # of these
        self.bucket: list[Tensor] = []
        self.count = 0
        self.buffer: Storage | None = None
        self.stream = REDUCE if self.layout.overlap else COMPUTE
        self.away, self.afar = (
            where != "none" for where in (self.layout.offload_optimizer, self.layout.offload_param)
        )

    # ----------------------------------------------------------------------------------- the start
    def load(self, body: Body) -> None:
        r = self.r
        with silently(r):
            body.load()
            body.adapt()
            self.cast(body)
        told, direct, self.products, self.matrices = (
            told_of(body),
            multiplied(body),
            products(body),
            matrices(body),
        )
        trained = {id(leaf) for group in self.groups(body) for leaf in group}
        passing: list[Storage | None] = []
        for unit in settled(self, body):
            for leaf in unit.leaves:
                (passing if id(leaf) in trained else self.kept).append(self.cut(leaf))
            alone = tuple(
                self.params[id(leaf)] for leaf in unit.leaves if id(leaf) not in told | direct
            )
            self.wholes[unit.name] = Module(f"{unit.name} itself", alone)
        self.direct = tuple(param for leaf, param in self.params.items() if leaf in direct)
        r.mark("prepare")
        # trained parts go to the host, and their blocks back to the driver (defragment)
        passing.clear()
        if not self.afar:
            r.write(Trim())
        self.arrange(self.groups(body))

    def cut(self, leaf: Tensor) -> Storage | None:
        """A parameter is there whole for a moment (zero.Init); this rank's part of it stays."""
        r = self.r
        leaf.shape = leaf.shape or (1,)
        r.where = ".".join(filter(None, (r.span, leaf.name.rpartition(".")[0])))
        part = -(-leaf.count // self.ranks)
        there = r.scratch(leaf.format.bytes(leaf.count), "empty", "weights")
        own = None if self.afar else r.scratch(leaf.format.bytes(part), "part", "weights")
        del there
        whole = (
            part * self.ranks if self.ranks > 1 or self.afar else 0
        )  # one rank's part is taken as it stands there (NoGatherHandle)
        leaf.storage = r.elastic(
            leaf.format.bytes(whole), "gather", "communication", self.coordinator.stream
        )
        self.params[id(leaf)] = param = Param(
            leaf=leaf, part=part, count=leaf.count, stays=leaf.count <= self.layout.persistence
        )
        if self.layout.hpz > 1:
            param.second = second(r, param, self.layout)
        return own

    def arrange(self, groups: list[list[Tensor]]) -> None:
        """Trained parts come back in one buffer; fp32 copies are cast from it and cloned; then come
        the bucket and the buffer of gradients."""
        r = self.r
        self.stored = groups[0][0].format
        self.groups_of = [
            part
            for group in groups
            for part in self.divided([self.params[id(leaf)] for leaf in group])
        ]
        if not self.afar:
            self.kept.append(
                r.scratch(self.stored.bytes(sum(map(size_of, self.groups_of))), "flat", "weights")
            )
        for group in self.groups_of if not self.away else ():
            cast = (
                r.scratch(4 * size_of(group), "to", "temporaries")
                if self.stored is not FP32
                else None
            )
            self.masters.append(r.tensor((size_of(group),), FP32, "master", "master"))
            del cast
        if not self.away:
            zeros = r.scratch(4 * max(map(size_of, self.groups_of)), "zeros", "gradients")
            del zeros
        if self.layout.contiguous:
            self.buffer = r.scratch(
                self.wire.bytes(self.layout.reduce_bucket), "bucket", "communication"
            )
        if not self.away:
            self.kept.append(
                r.scratch(
                    self.format.bytes(sum(map(size_of, self.groups_of))), "gradients", "gradients"
                )
            )
        for param in (param for group in self.groups_of for param in group if self.ranks > 1):
            self.hooked(param)

    def hooked(self, param: Param) -> None:
        """Gathered to get its hook, and given up again (create_reduce_and_remove_grad_hooks)."""
        size = param.leaf.format.bytes(param.part * self.ranks)
        there = self.r.scratch(size, "all_gather", "communication")
        self.r.comm("all_gather", size, self.ranks, "zero")
        del there

    def divided(self, group: list[Param]) -> list[list[Param]]:
        """Groups of the optimizer in pieces of `sub_group_size` (_create_fp16_sub_groups)."""
        pieces: list[list[Param]] = [[]]
        for param in group:
            if size_of(pieces[-1]) >= self.layout.sub_group:
                pieces.append([])
            pieces[-1].append(param)
        return pieces

    def stepper(self, body: Body) -> Stepper:
        return stepper_of(self, self.masters, self.gradient)

    # ------------------------------------------------------------------------------------- modules
    def saves(self, body: Body) -> frozenset[int]:
        return products(body)

    def notify(self, act: str, name: str = "", leaves: Leaves = ()) -> None:
        """A module gathers what it needs before it runs, forward or backward, and gives it up when
        it has."""
        if name == ROOT and act == "before":
            self.coordinator.reset()
        if act in ("enter", f"leave{PAST}"):
            self.holder(act == "enter")
        if name == TAIL and act == "before":
            self.found()
        module = self.wholes[name] if name else self.module(leaves)
        forward = not act.endswith(PAST)
        if act in ("before", "enter", f"after{PAST}", f"leave{PAST}"):
            self.coordinator.fetch(module, forward)
            return
        for param in module.params:
            self.saved.pop(param, None)
        if act == f"leave{AGAIN}":
            self.save(module)
        self.coordinator.release(module, forward)
        for param in module.params:
            if param.state == HERE and param in self.saved:
                param.storage.join(self.saved.pop(param))

    def save(self, module: Module) -> None:
        """What a recomputation saves of a weight is another tensor over its block
        (torch/utils/checkpoint.py _recomputation_hook `x.detach()`), so that the block stays until
        the product's backward, although the parameter is given up."""
        some = [
            param
            for param in module.params
            if id(param.leaf) in self.matrices and param.state == HERE
        ]
        self.saved.update((param, param.storage.part()) for param in some)

    def found(self) -> None:
        """What code takes from a module that is not called is gathered, and from then on with the
        whole model: before it runs, and for all of its backward (parameter_offload.py
        ZeROOrderedDict, register_external_parameter)."""
        if any(param.state == AWAY for param in self.direct):
            self.coordinator.take(self.direct)
            root = self.wholes[ROOT]
            self.wholes[ROOT], self.direct = Module(root.name, (*root.params, *self.direct)), ()

    def module(self, leaves: Leaves) -> Module:
        key = self.r.where, leaves
        if key not in self.modules:
            params = tuple(self.params[id(leaf)] for leaf in leaves if leaf is not None)
            self.modules[key] = Module(
                f"{self.r.where} {params[0].leaf.name if params else ''}", params
            )
        return self.modules[key]

    def holder(self, forward: bool) -> None:
        """A module that holds others, as attention does, has no parameters, and yet asks for what
        comes next."""
        holder = self.r.where.rpartition(".")[0]
        if holder != self.inside:
            self.inside = holder
            if holder and holder != self.r.span:
                self.coordinator.fetch(Module(holder), forward)
                self.coordinator.backward.pop(holder, None)

    # ----------------------------------------------------------------------------------- gradients
    def ready(self, leaf: Tensor) -> None:
        """Into the bucket, if there is room once it was emptied
        (reduce_independent_p_g_buckets_and_remove_grads)."""
        if id(leaf) not in self.params:
            return
        self.saved.pop(self.params[id(leaf)], None)  # the product's backward is over
        where, self.r.where = self.r.where, self.r.span
        if self.bucket and self.count + leaf.count > self.layout.reduce_bucket:
            self.reduce()
        if self.layout.contiguous and self.count + leaf.count <= self.layout.reduce_bucket:
            leaf.grad = Tensor(
                leaf.shape, leaf.format if self.wire is self.format else self.wire, self.buffer
            )
        self.bucket.append(leaf)
        self.count += leaf.count
        self.r.where = where

    def reduce(self) -> None:
        """All ranks' parts are put together, summed up and copied to where they stay
        (reduce_scatter_coalesced, partition_grads)."""
        if not self.bucket:
            return
        size = sum(self.params[id(leaf)].part for leaf in self.bucket) * self.ranks
        alone = len(self.bucket) == 1 and size == self.bucket[0].count
        wide = [
            leaf.count
            for leaf in self.bucket
            if leaf.grad is not None and leaf.grad.storage is not self.buffer
        ]
        wide = wide if self.stored is not self.wire else []
        casts = [
            self.r.scratch(self.wire.bytes(count), "to", "communication", self.stream)
            for count in wide
        ]
        together = (
            None
            if alone
            else self.r.scratch(self.wire.bytes(size), "cat", "communication", self.stream)
        )
        self.r.comm("reduce_scatter", self.wire.bytes(size), self.ranks, "zero", self.stream)
        back = (
            [
                self.r.scratch(
                    self.format.bytes(self.params[id(leaf)].part),
                    "to",
                    "communication",
                    self.stream,
                )
                for leaf in self.bucket
            ]
            if self.wire is not self.format
            else []
        )
        wides: list[Storage | None] = []
        for leaf in self.bucket:
            if self.away:
                wides.append(self.send(self.params[id(leaf)].part))
            leaf.grad = None
        del together, casts, wides, back
        self.bucket, self.count = [], 0

    def send(self, part: int) -> Storage | None:
        """Added up on the host, by way of the device; after the last micro-batch its norm is taken,
        and fp32 goes there (partition_grads). To NVMe those of a bucket go together, and stand on
        the device until then (_offload_grad_partition_at_boundary)."""
        back = self.r.scratch(self.format.bytes(part), "to", "gradients", self.stream)
        wide: Storage | None = None
        if self.last:
            norm(self.r, (min(part, AT_ONCE),), self.stream)
            wide = (
                self.r.scratch(4 * part, "to", "gradients", self.stream)
                if self.format is not FP32
                else back
            )
        del back
        return wide if self.layout.offload_optimizer == "nvme" else None

    def finish(self) -> None:
        self.reduce()
        self.coordinator.leftovers()
        self.inside = ""
        self.saved.clear()

    # ------------------------------------------------------------------------------------ the step
    def gradient(self, index: int) -> Tensor | None:
        r, group = self.r, self.groups_of[index]
        r.where = ""
        if index == 0:
            self.coordinator.all_away(self.params.values())
            norm(r, [param.part for some in self.groups_of for param in some])
        together: Storage | None = None
        if len(group) > 1:
            together = r.scratch(self.format.bytes(size_of(group)), "flatten", "gradients")
        if self.format is not FP32:
            together = r.scratch(4 * size_of(group), "float", "gradients")
        return Tensor((size_of(group),), FP32, together)

    def stepped(self, step: int) -> None:
        """Small parameters are gathered again (_post_step)."""
        if self.away:
            self.coordinator.all_away(self.params.values())
        for param in self.params.values():
            if param.stays and param.state == AWAY:
                param.storage.take()
                param.state = HERE
                self.r.comm("all_gather", param.leaf.format.bytes(param.count), self.ranks, "zero")
        # then what the node held goes, which is of the weights before
        # (invalidate_secondary_tensor)
        for param in self.params.values():
            if param.leaf.needs:
                param.second = None


def size_of(group: list[Param]) -> int:
    return sum(param.part for param in group)


def told_of(body: Body) -> frozenset[int]:
    """Parameters of modules that engines are told of: linear layers, norms, embeddings,
    adapters."""
    found = set(module_leaves(body))
    for bound in (body.ends, *body.layers):
        found |= {id(packed.weight) for packed in bound.packed.values()}
        adapters = [linear.adapter for linear in bound.linears.values()]
        found |= {id(matrix) for one in adapters if one is not None for matrix in (one.a, one.b)}
    return frozenset(found if body.model.tied else found - multiplied(body))


def multiplied(body: Body) -> frozenset[int]:
    """The head's parameters, where the loss multiplies by them itself."""
    if body.program.job.loss in ("plain", "chunked") and head_of(body.program.job) == "plain":
        return frozenset()
    head = body.model.head.name
    return frozenset(
        id(body.ends.tensors[name])
        for name in (f"{head}.weight", f"{head}.bias")
        if name in body.ends.tensors
    )


def products(body: Body) -> frozenset[int]:
    """Weights that torch's `linear` multiplies by, which DeepSpeed replaces by a function that
    always saves its input (runtime/zero/linear.py LinearFunctionForZeroStage3)."""
    return matrices(body, own=True)


def matrices(body: Body, own: bool = False) -> frozenset[int]:
    """Weights that something is multiplied by, and that are saved for it; `own`: not those of
    GPT-2's Conv1D."""
    modules = [(body.ends, (*body.model.embed, *body.model.final, body.model.head))]
    modules += [
        (bound, (entry.layer,))
        for entry, bound in zip(body.program.entries, body.layers, strict=True)
    ]
    linears = [
        (bound, one)
        for bound, some in modules
        for module in some
        for one in module.linears()
        if not (own and one.conv1d)
    ]
    named = [(bound, f"{one.name}.weight") for bound, one in linears]
    return frozenset(id(bound.tensors[name]) for bound, name in named if name in bound.tensors)


ENGINE = ZeRO3
