"""Megatron's own data parallelism (megatron-core 0.16.1): fp32 gradients lie in one buffer on every
rank and are summed up in place, so that nothing comes and goes; with the distributed optimizer
every rank keeps a share of the fp32 copies and of the states, and the weights move into a buffer,
too (distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py).

Both buffers are made on a stream of their own (training/training.py get_model), so that the blocks
in which the weights were built serve nobody but what comes after: copies, states, activations. The
buffers stand here as a block for each span. Left out: their padding (each tensor's start to 64
values, the end to a multiple of the ranks), and what buckets overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from memfit.formats import BF16, FP32
from memfit.lower.engine import Engine, Unit, unfolded, units
from memfit.lower.optimize import Copies, Stepper
from memfit.lower.shards import bring, settled
from memfit.lower.tensors import Shape, Storage, Tensor
from memfit.model.modules import MLP, Attention, Latent, Layer, Linear
from memfit.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from memfit.lower.body import Body

SIDE = 1  # the stream on which the buffers are made
ALIGNED, END = 64, 128  # values


class Megatron(Engine):
    def load(self, body: Body) -> None:
        bring(self, body)
        layers = {
            bound.prefix: entry.layer
            for entry, bound in zip(self.program.entries, body.layers, strict=True)
        }
        self.built: dict[str, list[Storage | None]] = {}
        for unit in settled(self, body):
            blocks = self.built.setdefault(unit.span, [])
            for path, group in together(unit.leaves, layers.get(unit.span)):
                self.r.where = f"{unit.span}.{path}" if unit.span else path
                blocks += self.build(group)
        self.buffers = self.buffered(body)
        if self.sharded:
            for span, blocks in self.built.items():
                self.r.mark("prepare", span)
                blocks.clear()
        self.r.leave()

    def build(self, group: Sequence[Tensor]) -> Iterator[Storage | None]:
        """A block for what is one matrix, for each expert one; it is the tensors' own until they
        move."""
        size = sum(one.format.bytes(one.count) for one in group)
        times = group[0].shape[0] if len(group[0].shape) > 2 else 1
        for _ in range(times):
            block = self.r.scratch(size // times, "parameter", "weights")
            for one in group if times == 1 else ():
                one.storage = block
            yield block

    def buffered(self, body: Body) -> list[Storage | None]:
        """Of a span's trained tensors: their weights, where the optimizer is distributed, and their
        gradients in fp32."""
        found: list[Storage | None] = []
        for span, tensors in self.spans(body):
            self.r.mark("prepare", span)
            count = sum(one.count for one in tensors)
            if self.sharded:
                found.append(self.r.scratch(BF16.bytes(count), "param_data", "weights", SIDE))
                for one in tensors:
                    one.storage = found[-1]
            found.append(self.r.scratch(FP32.bytes(count), "main_grad", "gradients", SIDE))
        return found

    def stepper(self, body: Body) -> Stepper:
        return Stepper(
            self.r,
            OPTIMIZERS[self.program.job.optimizer],
            self.spans(body),
            master=self.program.master,
            copies=self.copies(body),
        )

    def copies(self, body: Body) -> Copies:
        """Shapes of what this rank keeps in fp32: of every matrix, in its layer, or where ranks
        share them, of those in its part of the buffer, experts after the rest (they have an
        optimizer of their own)."""
        program, strategy = self.program, self.program.strategy
        matrices = [(unit.span, one) for unit in units(body) for one in self.matrices(unit, body)]
        if max(program.shares, program.expert_shares) == 1:
            spans = dict.fromkeys(span for span, _ in matrices)
            return [
                (span, [(one.values,) for where, one in matrices if where == span])
                for span in spans
            ]
        every = unfolded(program, matrices)
        found: list[Shape] = []
        for expert, ranks, index in (
            (False, program.shares, strategy.replica),
            (True, program.expert_shares, strategy.expert_replica),
        ):
            counts = [one.values for one in every if one.expert == expert]
            found += [(count,) for count in part_of(counts, ranks, index) if count]
        return [("", found)]

    def matrices(self, unit: Unit, body: Body) -> Iterator[Matrix]:
        """Of a unit, in the order in which the model has them."""
        layers = {
            bound.prefix: entry.layer
            for entry, bound in zip(self.program.entries, body.layers, strict=True)
        }
        for _, group in together(unit.leaves, layers.get(unit.span)):
            count, stacked = sum(one.count for one in group), len(group[0].shape) > 2
            times = group[0].shape[0] if stacked else 1
            yield from (Matrix(count // times, stacked) for _ in range(times))

    def stepping(self) -> None:
        """Behind the last micro-batch every gradient is looked at for one that is no number,
        divided by the replicas and summed; then comes their norm, and they are multiplied by what
        it allows (core/distributed/param_and_grad_buffer.py start_grad_sync,
        core/optimizer/clip_grads.py)."""
        self.sweep("check_grads", 1)
        if self.program.strategy.data * self.program.strategy.size("cp") > 1:
            self.sweep("scale_gradients", 2)
        self.tell("reduce_scatter" if self.sharded else "all_reduce", FP32.block_bytes)
        if self.program.job.clip:
            self.sweep("l2norm", 1, own=True)
            self.sweep("clip_gradients", 2, own=True)

    def stepped(self, step: int) -> None:
        """The fp32 copies are cast into the weights, and the gradients set to nought
        (distrib_optimizer.py _copy_main_params_to_model_params)."""
        self.sweep("copy_parameters", 1.5, own=True)
        if self.sharded:
            self.tell("all_gather", BF16.block_bytes)
        self.sweep("zero_grad_buffer", 1)

    def sweep(self, op: str, times: float, *, own: bool = False) -> None:
        """A kernel that moves every gradient so often, or those of this rank's share."""
        values = sum(
            count // (ranks if own and self.sharded else 1) for _, ranks, count in self.groups()
        )
        self.r.where = ""
        self.r.compute(op, 0, round(times * FP32.bytes(values)), FP32.math)

    @property
    def sharded(self) -> bool:
        ddp = self.program.strategy.ddp
        return ddp is not None and ddp.distributed

    def tell(self, op: str, bytes: int) -> None:
        for name, ranks, count in self.groups():
            if ranks > 1 and count:
                self.r.comm(op, bytes * count, ranks, name)

    def groups(self) -> tuple[tuple[str, int, int], ...]:
        """(name, ranks, values): experts' values are summed among the ranks that hold the same
        ones."""
        strategy, model = self.program.strategy, self.program.model
        experts = sum(weight.count for weight in model.weights() if weight.role == "expert")
        return ("dp", strategy.data * strategy.size("cp"), model.parameters - experts), (
            "edp",
            max(1, strategy.expert_data),
            experts,
        )


class Matrix(NamedTuple):
    """How many values; is it an expert's."""

    values: int
    expert: bool


def part_of(counts: Sequence[int], ranks: int, rank: int) -> list[int]:
    """How many values of each tensor lie in a rank's part of the buffer, which has the last one
    first, each from a multiple of 64 on, and in all as many values as the ranks, and 128, divide
    (param_and_grad_buffer.py, distrib_optimizer.py _build_model_gbuf_param_range_map)."""
    starts: list[int] = []
    end = 0
    for count in reversed(counts):
        starts.append(-(-end // ALIGNED) * ALIGNED)
        end = starts[-1] + count
    whole = -(-end // lcm(ranks, END)) * lcm(ranks, END)
    low, high = rank * whole // ranks, (rank + 1) * whole // ranks
    return [
        max(0, min(start + count, high) - max(start, low))
        for start, count in zip(reversed(starts), counts, strict=True)
    ]


def together(leaves: Sequence[Tensor], layer: Layer | None) -> Iterator[tuple[str, list[Tensor]]]:
    """Tensors by the matrix that they are in Megatron, with the path of its first: queries, keys
    and values; gate and up."""
    first = {} if layer is None else dict(firsts(layer))
    found: dict[str, list[Tensor]] = {}
    for leaf in leaves:
        module, _, kind = leaf.name.rpartition(".")
        found.setdefault(f"{first.get(module, module)}.{kind}", []).append(leaf)
    last = (
        set()
        if layer is None
        else {
            block.mixer.out.name
            for block in layer.blocks
            if isinstance(block.mixer, (Attention, Latent))
        }
    )
    paths = [name.rpartition(".")[0] for name in found]
    place = next((at for at, path in enumerate(paths) if path.startswith("self_attn")), 0)
    order = sorted(range(len(paths)), key=lambda at: (place - 0.5) if paths[at] in last else at)
    groups = list(found.values())
    yield from ((paths[at], groups[at]) for at in order)


def firsts(layer: Layer) -> Iterator[tuple[str, str]]:
    for block in layer.blocks:
        for one in (block.mixer, getattr(block.mixer, "shared", None)):
            joined: tuple[Linear, ...] = ()
            if isinstance(one, Attention):
                joined = one.project
            elif isinstance(one, MLP) and one.gate is not None:
                joined = (one.gate, one.up)
            yield from ((linear.name, joined[0].name) for linear in joined)


ENGINE = Megatron
