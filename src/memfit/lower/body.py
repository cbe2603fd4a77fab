"""The model on the device: its weights, and one forward pass from token ids to the last hidden
state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from memfit.formats import FP32
from memfit.lower import masks, versions
from memfit.lower.activation_offload import OnHost
from memfit.lower.attention import SHARED, tables
from memfit.lower.bound import Bound
from memfit.lower.cache import Cache
from memfit.lower.context import Context
from memfit.lower.embed import embedded
from memfit.lower.engine import EMBED, TAIL, Engine
from memfit.lower.frameworks import programs_of
from memfit.lower.head import final
from memfit.lower.layers import forward
from memfit.lower.load import head_apart, idle_linears, narrow, prepare, repack, warm_up
from memfit.lower.recorder import Recorder
from memfit.lower.stored import exllama_buffers
from memfit.lower.tensors import Hooks, Storage, Tensor
from memfit.model.model import Model
from memfit.model.modules import Attention, Latent, Layer, Module, Weight
from memfit.program import Chunk, Entry, Program
from memfit.tape import Phase
from memfit.techniques.stored import stays

if TYPE_CHECKING:
    from memfit.lower.script import Player

# The torch from which a recomputation ends when all that is wanted is there again
# (pytorch/pytorch#96866 of 2023-03-22, after 2.0 had its branch).
STOPS = (2, 1)
Run: TypeAlias = Callable[[Tensor, Entry, Bound, Context], Tensor]


class Body:
    """Everything of a Program that lives on the GPU: the ends in one Bound, each entry's layer in
    its own."""

    def __init__(self, r: Recorder, program: Program, engine: Engine | None = None) -> None:
        self.r, self.program, self.model = r, program, program.model
        self.engine = engine or Engine(r, program)
        self.programs = programs_of(program)
        packing = self.programs.packing
        self.ends = Bound(r, program, "", packing)
        self.blocks: list[Storage | None] = []  # of a quantized file
        self.layers = [Bound(r, program, self.path(entry), packing) for entry in program.entries]
        for one in self.layers:
            one.ends = self.ends
        self.shared: list[Tensor] = []
        self.batch: tuple[
            Tensor, ...
        ] = ()  # what the loop's variable holds, until the next one is there
        self.outputs: list[Tensor] = []  # of the last forward, where the loop keeps them,
        self.cache: Cache | None = None  # and its keys and values
        self.idle: list[Tensor] = []  # that train where a tower is used
        self.player: Player | None = None  # of passes that were walked before
        self.hooks: Hooks | None = None  # on what nodes save, around every micro-batch

    def path(self, entry: Entry) -> str:
        return self.model.path(entry.number)

    def load(self) -> None:
        """Weights in the order in which the model builds them."""
        model, r = self.model, self.r
        r.mark("load")
        if self.stored:
            self.load_stored()
            return
        if self.programs.start is None:
            warm_up(r, self.program)
        apart = head_apart(r, self.program)
        self.load_towers(model.ahead)
        if self.program.quant is not None and self.program.quant.double:
            self.shared.append(
                r.tensor((256,), FP32, "code", "weights")
            )  # bitsandbytes functional.py name2qmap: one table, made once
        for module in model.embed:
            self.ends.load(module.weights(), module.linears())
        for entry, bound in zip(self.program.entries, self.layers, strict=True):
            r.mark("load", bound.prefix)
            own = () if apart else self.layer_buffers()
            bound.load((*entry.layer.weights(), *own), entry.layer.linears())
            self.idle += bound.stop(model.unused)
        r.mark("load")
        for module in model.final:
            self.ends.load(module.weights(), module.linears())
        self.ends.load(model.buffers, ())
        self.load_towers(model.towers[len(model.ahead) :])
        if model.headless:
            pass
        elif model.tied:
            self.ends.tensors[f"{model.head.name}.weight"] = self.ends[
                f"{model.embed[0].name}.weight"
            ]
            r.shared.add(f"{model.embed[0].name}.weight")
            self.ends.load((weight for weight in model.head.weights() if weight.role == "bias"), ())
        else:
            self.ends.load(model.head.weights(), (model.head,))
        if apart:
            del apart
            self.load_layer_buffers()
        if self.programs.buffers is not None:
            self.ends.load(self.programs.buffers(self.program), ())
        self.idle += self.ends.stop(model.unused)
        if self.program.quant is not None and self.program.quant.again:
            self.everywhere(repack, "load")
        weights = (one for bound in self.layers for one in bound.tensors.values())
        self.shared += exllama_buffers(r, self.program, weights)

    def load_towers(self, weights: tuple[Weight, ...]) -> None:
        """Text gives a tower no gradient, and so the first step no state."""
        self.ends.load(weights, idle_linears(weights))
        self.idle += self.ends.stop(weight.name for weight in weights)

    def layer_buffers(self) -> tuple[Weight, ...]:
        return tuple((self.programs.layer_buffers or versions.tables)(self.program))

    def load_layer_buffers(self) -> None:
        """Tables that no checkpoint has follow the last weight (accelerate 1.6 big_modeling.py
        dispatch_model); the order only shows where a weight was freed before."""
        for bound in self.layers:
            self.r.mark("load", bound.prefix)
            bound.load(self.layer_buffers(), ())
        self.r.mark("load")

    @property
    def stored(self) -> bool:
        """Are the weights the blocks of a quantized file?"""
        return stays(self.program)

    def load_stored(self) -> None:
        """The file's blocks stay as they are; the weights that the programs name are views of them,
        of no size of their own."""
        model, r = self.model, self.r
        places: list[tuple[int, Bound, tuple[Module, ...]]] = [
            (-1, self.ends, (*model.embed, *model.final, model.head))
        ]
        places += [
            (entry.number, bound, (entry.layer,))
            for entry, bound in zip(self.program.entries, self.layers, strict=True)
        ]
        for number, bound, modules in places:
            r.mark("load", bound.prefix)
            for weight in (weight for module in modules for weight in module.weights()):
                bound.tensors[weight.name] = Tensor(weight.shape, bound.format(weight), None)
            for block in (block for block in model.stored if block.layer == number):
                r.where = bound.path(block.name)
                self.blocks.append(r.scratch(block.bytes, "parameter", "weights"))
        r.mark("load")
        self.ends.load(model.buffers, ())

    def adapt(self) -> None:
        """What stands before the training of a part: packed models are prepared, then adapters are
        added, then copies of the modules that are trained whole."""
        program, r = self.program, self.r
        if program.quant is not None and program.quant.prepared:
            self.everywhere(prepare)
        if program.adapter is None:
            return
        for entry, bound in zip(program.entries, self.layers, strict=True):
            r.mark("prepare", bound.prefix)
            for linear in entry.layer.linears():
                bound.adapt((linear,), idle=f"{linear.name}.weight" in self.model.unused)
            bound.adapt_parameters()
        r.mark("prepare")
        self.ends.adapt(idle_linears(self.model.towers), idle=True)
        for module in (*self.model.embed, *self.model.final, self.model.head):
            self.ends.adapt(module.linears())
        if program.adapter.saved:
            self.everywhere(Bound.copy_saved)
        if program.quant is not None and program.quant.narrowed:
            self.everywhere(narrow)

    def everywhere(self, change: Callable[[Bound], None], phase: Phase = "prepare") -> None:
        """Do it to the ends' weights and to every layer's, each in its own span."""
        self.r.mark(phase)
        change(self.ends)
        for bound in self.layers:
            self.r.mark(phase, bound.prefix)
            change(bound)

    def forward(self, ids: Tensor, ctx: Context, step: int) -> Tensor:
        return self.run_chunk(Chunk(0, len(self.layers), True, True), ids, ctx, step)

    def run_chunk(self, chunk: Chunk, x: Tensor, ctx: Context, step: int) -> Tensor:
        """From token ids to the last hidden state; or, of a pipeline's stage, the layers that it
        has, from what it received."""
        r = ctx.r
        phase = r.phase
        held: list[Tensor] = []
        start = self.programs.start
        if chunk.begins:
            x = self.engine.before(EMBED, x)
            x = (
                embedded(x, self.model, self.ends, ctx, held)
                if start is None
                else start(x, self.model, self.ends, ctx)
            )
            x = self.engine.after(EMBED, x)
        if start is None:
            self.make_masks(ctx, held)
            if not versions.alone(self.program):
                tables.make(self.model, ctx)
            self.engine.made(ctx)
        before = ""
        for entry, bound in zip(
            self.program.entries[chunk.first : chunk.last],
            self.layers[chunk.first : chunk.last],
            strict=True,
        ):
            place = bound.prefix.rpartition(".")[0]
            if before and place != before and self.programs.middle is not None:
                r.mark(phase, "", step)
                x = self.programs.middle(x, self.model, self.ends, ctx)
            before = place
            if r.notes is not None:
                x = r.notes.enter(r, x, entry)
            r.mark(phase, bound.prefix, step)
            if r.notes is not None:
                r.notes.keep(r, ctx.results)
            with r.hooked(
                OnHost(r) if ctx.training and ctx.job.activation_offload == "wrapper" else r.hooks
            ):
                x = self.layer(x, entry, bound, ctx)
            if r.notes is not None:
                r.notes.leave(x)
        r.mark(phase, "", step)
        if r.notes is not None:
            r.notes.keep(r, ctx.results)
        if chunk.ends:
            x = self.engine.before(TAIL, x)
            x = final(x, self.model, self.ends, ctx)
        ctx.masks, ctx.tables, ctx.cos, ctx.sin, ctx.distances, ctx.unseen = (
            {},
            {},
            None,
            None,
            None,
            None,
        )
        ctx.results.clear()
        ctx.shared, ctx.crossing = {}, {}
        del held
        return x

    def layer(self, x: Tensor, entry: Entry, bound: Bound, ctx: Context) -> Tensor:
        """One layer, checkpointed or not; a checkpoint keeps the layer's input and nothing else."""
        selective = ctx.job.checkpointing == "selective"
        if not (entry.recompute and ctx.training) or (selective and self.programs.choices is None):
            return wrapped(x, entry, bound, ctx)
        if not self.engine.around:
            return self.checkpointed(wrapped, x, entry, bound, ctx)
        x = self.engine.before(bound.prefix, x)
        return self.engine.after(
            bound.prefix, self.checkpointed(bare, x, entry, bound, self.engine.given(ctx))
        )

    def checkpointed(self, run: Run, x: Tensor, entry: Entry, bound: Bound, ctx: Context) -> Tensor:
        own = narrowed(ctx, entry.layer)
        if ctx.job.reentrant or self.programs.reentrant:
            return ctx.r.reentrant(
                lambda given: replayable(run, given, entry, bound, own), x, own.results
            )
        choices = self.programs.choices if ctx.job.checkpointing == "selective" else None
        whole = self.programs.whole or ctx.torch < STOPS
        given_to = own.shared
        out = ctx.r.checkpoint(
            lambda given: replayable(run, given, entry, bound, own), x, choices, whole
        )
        if own.shared is not given_to:  # what the layer made for others
            ctx.shared = {**ctx.shared, **own.shared}
            own.shared = given_to
        return out

    def make_masks(self, ctx: Context, held: list[Tensor]) -> None:
        """For a static cache `generate` made them, and keeps them whatever the model makes of
        them."""
        ctx.r.where = self.model.prefix.rpartition(".")[0]
        eager = ctx.job.attention == "eager" or not runs_sdpa(self.model)
        ctx.masks = {
            window: masks.build(ctx, window, eager)
            for window in masks.windows(self.model, asked=ctx.static)
        }
        held += [mask for mask in ctx.masks.values() if mask is not None and ctx.static]
        ctx.unseen = self.programs.sequences.unseen_mask(ctx)
        for mixer in {mixer.style: mixer for mixer in self.model.attentions}.values():
            if mixer.style in SHARED:
                SHARED[mixer.style](mixer, self.model, ctx)

    def trained(self) -> list[tuple[str, list[Tensor]]]:
        """Trained tensors by the span they belong to, in the model's order: embeddings, layer by
        layer, and the other end."""
        early = {weight.name for module in self.model.embed for weight in module.weights()}
        first: list[Tensor] = []
        last: list[Tensor] = []
        for tensor in self.ends.trained():
            (first if tensor.name in early else last).append(tensor)
        return [
            ("", first),
            *((bound.prefix, bound.trained()) for bound in self.layers),
            ("", last),
        ]

    def free(self) -> None:
        self.ends, self.layers = Bound(self.r, self.program, ""), []


def narrowed(ctx: Context, layer: Layer) -> Context:
    """What a checkpoint holds beside the layer's input: the mask and the tables that this layer was
    given, not those of others."""
    windows = {
        masks.window_of(block.mixer)
        for block in layer.blocks
        if isinstance(block.mixer, (Attention, Latent))
    }
    given = {window > 0: ctx.tables[window > 0] for window in windows if (window > 0) in ctx.tables}
    own = replace(ctx, masks={window: ctx.masks.get(window) for window in windows}, tables=given)
    for window in windows:
        tables.choose(own, window)
    if layer.captured is not None:
        from memfit.lower import captured  # written programs start without graphs

        own.shared = captured.arguments(layer.captured.graph, ctx)
    return own


def wrapped(x: Tensor, entry: Entry, bound: Bound, ctx: Context) -> Tensor:
    """A layer, and what the engine does before and after it."""
    x = ctx.engine.before(bound.prefix, x)
    return ctx.engine.after(bound.prefix, forward(x, entry.layer, bound, ctx.engine.given(ctx)))


def bare(x: Tensor, entry: Entry, bound: Bound, ctx: Context) -> Tensor:
    return forward(x, entry.layer, bound, ctx)


def replayable(run: Run, x: Tensor, entry: Entry, bound: Bound, ctx: Context) -> Tensor:
    """A layer within a checkpoint: when it is recomputed, it has an autocast of its own
    (torch/utils/checkpoint.py recompute_fn). The keys and values that it returns then are what its
    backward keeps anyway."""
    if ctx.r.phase == "backward":
        ctx.cache = None
    try:
        return run(x, entry, bound, ctx)
    finally:
        if ctx.r.phase == "backward":
            ctx.casts.clear()
            if not ctx.job.reentrant:  # there they stay until the backward inside is done
                ctx.results.clear()


def runs_sdpa(model: Model) -> bool:
    """Whether the model's attention has an SDPA path; without one transformers runs it eagerly."""
    return all("sdpa" in mixer.kernels for mixer in model.attentions)
