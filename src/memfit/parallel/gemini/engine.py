"""ColossalAI's Gemini (colossalai 0.3.0 zero/gemini/, LLMem's copy of commit d4fb7bf among them;
torch 2.0 ProcessGroupNCCL.cpp).

Weights lie in chunks of one size, in the model's order; fp32 copies lie in chunks like them. Each
rank keeps its part. Whoever multiplies by a weight gathers its chunk. Placed on the GPU (`cuda`),
nothing is given up again before the chunk's gradients are all there: they are copied over the
weights, summed up over the ranks, and what stays is this rank's part of them, where the optimizer
reads it; the weights come back from the fp32 copies. Placed on the host (`cpu`), a chunk is given
up as soon as another is asked for.

The model comes to the GPU in fp32, whole, and is made 16-bit there; tensor parallelism cuts it
afterwards. `empty_cache` follows each of these, and what the shards were cut from stays: the gaps
are a good part of what such a run holds. Left out: `auto` and `const`, which move chunks by what
they measure.

Collectives are asked for over lists of tensors, so that they copy all of them to or from a flat one
on NCCL's stream, for which it is kept back when it is freed (torch 2.0 ProcessGroupNCCL.cpp
allgather, reduce_scatter), until the next collective here: Python's hooks around every operation
keep the CPU busy, LLMem's measured models ask nvidia-smi in every layer (real_models/), and its
first step waits for the GPU before every operation (its copy of placement_policy.py has
`need_mem_stats` for `cuda`, too; memory_monitor.py SyncCudaMemoryMonitor). Left out: a CPU that
runs ahead, with which all that a forward gathered through would wait for the first sum of
gradients, at most as much again as the 16-bit weights; a retry takes it back.
"""

from __future__ import annotations

from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING

from memfit.formats import FORMATS, FP32, Format
from memfit.lazy_dataclass import dataclass
from memfit.lower.engine import Engine, Leaves, gate, names, silently
from memfit.lower.optimize import Spans, Stepper
from memfit.lower.recorder import Recorder
from memfit.lower.shards import settled
from memfit.lower.tensors import Storage, Tensor
from memfit.optimizers import OPTIMIZERS
from memfit.parallel.flat_parameters import Lent
from memfit.parallel.gemini.chunks import search
from memfit.program import Program
from memfit.strategy import Strategy
from memfit.tape import Part, Sync, Trim

if TYPE_CHECKING:
    from memfit.lower.body import Body

COMPUTE, NCCL = 0, 1  # streams
# the group of all ranks, over which biases and norms are replicated beside tensor parallelism
WORLD = "world"


@dataclass(slots=True, kw_only=True, eq=False)
class Chunk:
    """`whole` is what is gathered, `part` this rank's 16 bits of it, `master` its fp32 copies."""

    size: int  # values
    ranks: int
    stays: bool  # gathered for good
    whole: Lent
    leaves: list[Tensor] = field(default_factory=list)
    used: int = 0
    part: Lent | None = None
    master: Storage | None = None
    here: bool = True  # gathered
    busy: int = 0  # weights that a kernel uses
    done: int = 0  # gradients that have come

    @property
    def shard(self) -> int:
        return self.size if self.stays else self.size // self.ranks


class Gemini(Engine):
    inner = True
    clips = False  # the norm is taken of each chunk as it is summed up
    repeats = False

    def __init__(self, r: Recorder, program: Program) -> None:
        super().__init__(r, program)
        assert program.strategy.gemini is not None
        self.layout = program.strategy.gemini
        self.world = program.strategy.ranks
        self.rank = program.strategy.rank // program.strategy.size("tp") % max(1, self.layout.size)
        self.format = FORMATS[program.weights]
        self.away = self.layout.placement == "cpu"
        self.chunks: list[Chunk] = []
        self.place: dict[int, Chunk] = {}
        self.stepped_once = False

    @staticmethod
    def foldable(strategy: Strategy) -> bool:
        """Chunks know no layers."""
        return False

    # ----------------------------------------------------------------------------------- the start
    def load(self, body: Body) -> None:
        """As LLMem's loop does it: in fp32 to the GPU, each weight made 16-bit there, cut where a
        matrix is split, put into chunks."""
        r = self.r
        with silently(r):
            body.load()
        leaves = [leaf for unit in settled(self, body) for leaf in unit.leaves]
        table = body.ends[f"{body.model.embed[0].name}.weight"]
        leaves.sort(
            key=lambda leaf: leaf is not table
        )  # a tied head's, which units count among the last
        full = [
            r.scratch(FP32.bytes(leaf.count * self.parts(leaf)), "to", "weights") for leaf in leaves
        ]
        self.untied()
        half: list[Storage | None] = []
        for index, leaf in enumerate(leaves):
            half.append(
                r.scratch(self.format.bytes(leaf.count * self.parts(leaf)), "half", "weights")
            )
            full[index] = None
        r.write(Trim())
        if self.program.split:
            for index, leaf in enumerate(leaves):
                if self.parts(leaf) > 1:
                    half[index] = r.scratch(self.format.bytes(leaf.count), "clone", "weights")
            r.write(Trim())
        r.mark("prepare")
        self.fill(leaves, half)
        r.write(Trim())

    def untied(self) -> None:
        """Built within ColoInitContext, which takes each module to the GPU as it is made, a tied
        head has a matrix of its own until the model is there and ties it
        (zero/gemini/colo_init_context.py; transformers 4.29 modeling_utils.py post_init)."""
        model = self.program.model
        if self.program.split and model.tied:
            head = self.r.scratch(
                FP32.bytes(
                    model.head.outputs * model.head.inputs * self.program.strategy.size("tp")
                ),
                "to",
                "weights",
            )
            del head

    def parts(self, leaf: Tensor) -> int:
        """Ranks that a weight is cut over: matrices and tables are (`check.split`)."""
        return self.program.strategy.size("tp") if len(leaf.shape) == 2 else 1

    def degree(self, leaf: Tensor) -> int:
        """Ranks that hold the same part of it."""
        return self.world // self.parts(leaf)

    def fill(self, leaves: list[Tensor], half: list[Storage | None]) -> None:
        """Each weight joins the last chunk of its kind, in 16 bits and in fp32, or closes it and
        begins another (gemini_ddp.py _init_chunks, chunk/manager.py register_tensor). The fp32 copy
        lives until the next one is made."""
        r = self.r
        sizes: dict[int, list[int]] = {}
        for leaf in leaves:
            sizes.setdefault(self.degree(leaf), []).append(leaf.count)
        config = search(sizes, self.layout)
        last: dict[int, Chunk] = {}
        masters: dict[int, Storage | None] = {}
        copy: Storage | None = None
        for index, leaf in enumerate(leaves):
            degree = self.degree(leaf)
            r.where = leaf.name.rpartition(".")[0]
            fresh = r.scratch(FP32.bytes(leaf.count), "float", "temporaries")
            copy = fresh
            del fresh
            chunk = old = last.get(degree)
            if chunk is None or chunk.used + leaf.count > chunk.size:
                if old is not None:
                    self.close(old, self.format)
                size, stays = config[degree]
                chunk = last[degree] = self.open(
                    max(size, leaf.count + -leaf.count % degree), degree, stays
                )
            half[index] = None
            if chunk is not old:
                if old is not None:
                    self.close(old, FP32, masters.pop(id(old), None))
                masters[id(chunk)] = r.scratch(FP32.bytes(chunk.size), "zeros", "master")
            leaf.storage = chunk.whole
            chunk.leaves.append(leaf)
            chunk.used += leaf.count
            self.place[id(leaf)] = chunk
        del copy
        for format in (self.format, FP32):
            for chunk in last.values():
                self.close(chunk, format, masters.pop(id(chunk), None) if format is FP32 else None)

    def open(self, size: int, degree: int, stays: bool) -> Chunk:
        whole = self.lent(self.format.bytes(size), "chunk", "weights" if stays else "communication")
        chunk = Chunk(size=size, ranks=degree, stays=stays, whole=whole)
        self.chunks.append(chunk)
        return chunk

    def lent(self, size: int, op: str, part: Part) -> Lent:
        """A block that collectives read or write: NCCL's stream is waited for when it is freed."""
        found = Lent(size, lambda: self.r.block(size, op, part), self.r.write, (NCCL,))
        found.take()
        return found

    def close(self, chunk: Chunk, format: Format, master: Storage | None = None) -> None:
        """This rank's part is copied out (chunk/chunk.py close_chunk); placed on the host, it goes
        there."""
        if format is self.format and not chunk.stays:
            self.scatter(chunk)
        if format is FP32:
            chunk.master = (
                master
                if chunk.stays
                else self.r.scratch(FP32.bytes(chunk.shard), "shard", "master")
            )
            if self.away and not chunk.stays:
                chunk.master = None

    def scatter(self, chunk: Chunk) -> None:
        """(__scatter; with `cpu`, move_chunk behind it)"""
        chunk.part = self.lent(self.format.bytes(chunk.shard), "shard", "weights")
        chunk.whole.drop()
        chunk.here = False
        if self.away:
            chunk.part = None

    def spans(self, body: Body) -> Spans:
        """The optimizer steps on pieces of the fp32 chunks, a weight's each (gemini_optimizer.py
        __init__optimizer)."""
        pieces: list[Tensor] = []
        for chunk in self.chunks:
            if chunk.master is None:
                continue
            at, first = 0, 0 if chunk.stays else chunk.shard * self.rank
            for leaf in chunk.leaves:
                count = min(at + leaf.count, first + chunk.shard) - max(at, first)
                at += leaf.count
                if count > 0:
                    piece = Tensor((count,), FP32, chunk.master)
                    piece.needs, piece.name = True, leaf.name
                    pieces.append(piece)
        return [("", pieces)]

    def stepper(self, body: Body) -> Stepper:
        """HybridAdam: one kernel over all pieces, two moments like each
        (nn/optimizer/hybrid_adam.py)."""
        row = OPTIMIZERS["adamw_fused"]
        hybrid = replace(
            row, rules=tuple(replace(rule, states=("like", "like")) for rule in row.rules)
        )
        return Stepper(
            self.r,
            hybrid,
            self.spans(body),
            partial(names, self.program),
        )

    # ------------------------------------------------------------------------------------- weights
    def enter(self, leaves: Leaves, x: Tensor) -> Tensor:
        chunks = self.use(leaves)
        return gate(self.r, x, lambda: self.leave_kernel(chunks))

    def leave(self, leaves: Leaves, out: Tensor) -> Tensor:
        where = self.r.where
        self.leave_kernel(self.of(leaves))

        def back() -> None:
            self.r.where = where
            self.use(leaves)

        return gate(self.r, out, back)

    def of(self, leaves: Leaves) -> list[Chunk]:
        found = [self.place[id(leaf)] for leaf in leaves if leaf is not None]
        return list({id(chunk): chunk for chunk in found}.values())

    def use(self, leaves: Leaves) -> list[Chunk]:
        """(gemini_hook.py pre_op): what nobody uses goes to the host first, if that is where chunks
        are placed."""
        chunks = self.of(leaves)
        for chunk in chunks:
            chunk.busy += 1
        for chunk in self.chunks if self.away else ():
            if chunk.here and not (chunk.stays or chunk.busy or chunk.done):
                self.scatter(chunk)
        for chunk in chunks:
            self.gather(chunk)
        return chunks

    def leave_kernel(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            chunk.busy -= 1

    def gather(self, chunk: Chunk) -> None:
        """(__gather)"""
        if chunk.here:
            return
        if self.away:
            self.fetch(chunk)
        chunk.whole.take()
        self.flat("all_gather", chunk)
        chunk.part = None
        chunk.here = True

    def fetch(self, chunk: Chunk) -> None:
        """From the host; after a step the fp32 copies come, and are made 16-bit here (chunk.py
        shard_move, __paired_shard_move)."""
        size = self.format.bytes(chunk.shard)
        wide = (
            self.r.scratch(FP32.bytes(chunk.shard), "to", "temporaries")
            if self.stepped_once
            else None
        )
        chunk.part = self.lent(size, "to", "weights")
        del wide
        self.r.comm("copy", size, 1, "host")

    def flat(self, op: str, chunk: Chunk) -> None:
        """A collective over a list of tensors."""
        size = self.format.bytes(chunk.size)
        self.r.write(Sync(COMPUTE, NCCL))
        flat = self.lent(size, "flatten", "communication")
        self.r.comm(op, size, chunk.ranks, self.group(chunk))
        del flat

    def group(self, chunk: Chunk) -> str:
        return "gemini" if chunk.ranks == self.layout.size else WORLD

    # ----------------------------------------------------------------------------------- gradients
    def ready(self, leaf: Tensor) -> None:
        """An empty tensor takes the gradient's place; the gradient itself is copied over the weight
        (gemini_ddp.py grad_handle)."""
        r, chunk = self.r, self.place[id(leaf)]
        where, r.where = r.where, leaf.name.rpartition(".")[0]
        empty = r.scratch(leaf.format.bytes(leaf.count), "empty_like", "gradients")
        del empty
        chunk.done += 1
        if chunk.done == len(chunk.leaves):
            self.reduce(chunk)
        leaf.grad = None
        r.where = where

    def reduce(self, chunk: Chunk) -> None:
        """The sum over the ranks; then values that overflowed are looked for, and the CPU waits for
        the answer (chunk.py reduce, has_inf_or_nan)."""
        r, format = self.r, self.format
        chunk.done = 0
        if chunk.stays:
            if chunk.ranks > 1:
                r.comm("all_reduce", format.bytes(chunk.size), chunk.ranks, self.group(chunk))
        else:
            chunk.part = self.lent(format.bytes(chunk.shard), "shard", "gradients")
            if chunk.ranks > 1:
                self.flat("reduce_scatter", chunk)
            chunk.whole.drop()
            chunk.here = False
        count = chunk.used if chunk.stays else chunk.shard
        for size in ((format.block_bytes + 1) * count, count):  # |x| and a mask; x != x
            found = r.scratch(size, "isinf", "temporaries")
            del found
        r.write(Sync(COMPUTE, NCCL))
        if self.program.job.clip:
            wide = r.scratch(FP32.bytes(count), "float", "temporaries")
            del wide
        if self.away and not chunk.stays:
            chunk.part = None

    def stepped(self, step: int) -> None:
        self.stepped_once = True


ENGINE = Gemini
