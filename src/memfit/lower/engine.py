"""The interface of data-parallel engines (DDP, FSDP, ZeRO …): the calls that the training loop and
the model make, and what an engine may do in them.

An engine is a subclass of `Engine`, in a file of its own here, named `ENGINE` there and chosen in
`engine_of`. Everything it does happens in these methods, in this order; `lower/train.py` and
`lower/body.py` call them:

    load(body)          brings the weights. A sharding engine loads with `silently(r)`, which writes
    no event, and then gives every tensor of
                        every `Unit` its storage: shards that it keeps itself, `Elastic` storages
                        for what is gathered (see `units`).
                        Each block belongs into the span of its unit: `r.mark("load", unit.span)`
                        first.
    stepper(body)       what the optimizer steps on, at which moments, with what states: by default
    an ordinary `Stepper` over `spans(body)`.
    begin(last)         a micro-batch begins; `last`: the optimizer steps after it.
    before(name, x)     a module is about to run on x: `root`, `embed`, a layer by its path, `tail`
    (final norm and head). What it returns is what
                        the module gets: `gate(r, x, act)` hangs `act` into the graph, to be called
                        when the backward has left the module.
    after(name, out)    the module has run; `gate(r, out, act)` has `act` called when the backward
    is about to enter it. With checkpointing both
                        stand inside what is run again (`r.frame` and `r.frame.replaying` say so),
                        as hooks of a Hugging Face layer do; `around`
                        puts a layer's outside.
    made(ctx)           masks and rotary tables are there, for all layers; given(ctx) is what a
    layer sees of them.
    enter(leaves, x), leave(leaves, out)  the same around every linear layer, norm and embedding,
    for an engine that is `inner`: modules by
                        their own parameters, `r.where` being their path.
    handed(outputs)     what the model returns beside its loss: the list is what the caller gets.
    ready(leaf)         a parameter's gradient has come (`leaf.grad`), as torch's accumulate hook
    has it.
    finish()            the backward is over, before the loop goes on.
    stepping()          the optimizer is about to step;
    stepped(step)       it has.

Of a pipeline (`parallel/pipeline/stages.py`), where a rank may have several stages:

    ahead_of(turns)     these turns are still to come, of a schedule of several stages.
    enters(chunk)       this stage is about to run, forwards or backwards.
    stage_before(x), stage_after(out)  its forward begins with x, and is over.
    paused()            the backward of a micro-batch is over.
    reduced()           so is that of the stage's last one.

Compact tapes: one layer stands for many, so an engine's events within a layer's span must be alike
from layer to layer (what the first one makes and the last one frees is fine), and their `where`
must lie in the span that writes them: set `r.where = r.span`. What is counted over all layers
(buckets, flat buffers) belongs into the span `""`, with `unfolded`. An engine that cannot keep to
this is not `foldable`. Sizes are the program's own bytes; side streams are told by `stream`
(`r.scratch`), collectives by `r.comm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from memfit.formats import Format
from memfit.lazy_dataclass import dataclass
from memfit.lower.optimize import Names, Spans, Stepper
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.optimizers import OPTIMIZERS
from memfit.program import Program, Stage
from memfit.strategy import Strategy

if TYPE_CHECKING:
    from memfit.lower.body import Body
    from memfit.lower.bound import Bound
    from memfit.lower.context import Context
    from memfit.lower.schedules import Turn
    from memfit.model.modules import Module

ROOT, EMBED, TAIL = "root", "embed", "tail"
T = TypeVar("T")
Leaves: TypeAlias = (
    "tuple[Tensor | None, ...]"  # the parameters of a module, None for those that it lacks
)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What hooks on saved tensors tell weights by, which stay on the GPU: `blocks` whose addresses
    they know, `parameters` (by identity) that a node saves itself, and not a view of them.
    `leaves`: those that do not lie in order, or not at the beginning of their block. `whole`:
    linear layers save the parameter and not its transpose; `straight` are those (Conv1D) that do so
    in any case."""

    blocks: frozenset[int] = frozenset()
    parameters: frozenset[int] = frozenset()
    leaves: frozenset[int] = frozenset()
    straight: frozenset[int] = frozenset()
    whole: bool = False


class Engine:
    """One rank alone: nothing happens."""

    steps = 2  # until a run repeats itself
    inner = False  # is told of linear layers, norms and embeddings too (`enter`, `leave`)
    clips = True  # the training loop clips gradients, by torch's own function
    around = False  # its layers stand around a checkpoint, not inside
    scripted = False  # it can act on what it was told in a walk of one layer for many
    repeats = (
        True  # a later step's micro-batches are those of the first, if both begin without gradients
    )

    def __init__(self, r: Recorder, program: Program) -> None:
        self.r, self.program = r, program
        if type(self).ready is not Engine.ready:  # else nobody asks
            r.ready = self.ready

    @staticmethod
    def distinct_ranks(
        program: Program, *, every: bool, lightest: bool
    ) -> tuple[tuple[int, int], ...] | None:
        """(rank, how many are like it) of the ranks that hold different amounts, the worst among
        them; not `lightest`: without the one that holds least; not `every`: the one that is likely
        the worst. None: they are alike but for what the strategy says itself."""
        return None

    # inner layers are alike to the allocator as well: each lets go of what the one before it took
    steady = True

    @staticmethod
    def foldable(strategy: Strategy) -> bool:
        """May one layer stand for all that are like it?"""
        return True

    @staticmethod
    def passing(strategy: Strategy) -> Strategy:
        """The layout as far as the passes depend on it, of those that are `scripted`."""
        return strategy

    def load(self, body: Body) -> None:
        body.load()
        body.adapt()

    def spans(self, body: Body) -> Spans:
        return body.trained()

    def stepper(self, body: Body) -> Stepper:
        program = self.program
        return Stepper(
            self.r,
            OPTIMIZERS[program.job.optimizer],
            self.spans(body),
            partial(names, program),
            program.master,
            cut=body.programs.dtensors(program),
            idle=(*body.idle, *body.ends.idle),
        )

    def weights(self, body: Body) -> Weights:
        """Addresses are those before an engine takes the weights (trl 1.16
        models/activation_offloading.py update_model_params)."""
        return Weights(
            blocks=frozenset(one.storage.id for one in leaves(body) if one.storage is not None)
        )

    def seen(self, leaf: Tensor) -> Format:
        """The dtype that a parameter shows to code outside of its module."""
        return leaf.format

    def begin(self, last: bool) -> None:
        pass

    def before(self, name: str, x: Tensor) -> Tensor:
        return x

    def after(self, name: str, out: Tensor) -> Tensor:
        return out

    def made(self, ctx: Context) -> None:
        pass

    def given(self, ctx: Context) -> Context:
        return ctx

    def enter(self, leaves: Leaves, x: Tensor) -> Tensor:
        return x

    def leave(self, leaves: Leaves, out: Tensor) -> Tensor:
        return out

    def handed(self, outputs: list[Tensor]) -> None:
        pass

    def ready(self, leaf: Tensor) -> None:
        pass

    def finish(self) -> None:
        pass

    def stepping(self) -> None:
        pass

    def stepped(self, step: int) -> None:
        pass

    def ahead_of(self, turns: tuple[Turn, ...]) -> None:
        pass

    def enters(self, chunk: int) -> None:
        pass

    def stage_before(self, x: Tensor) -> Tensor:
        return x

    def stage_after(self, out: Tensor) -> Tensor:
        return out

    def paused(self) -> None:
        pass

    def reduced(self) -> None:
        pass


ENGINE = Engine


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The parameters of a module that engines may treat as one, in the model's order, and the span
    that their events belong to; on a compact tape it stands for `times` such modules."""

    name: str
    span: str
    leaves: tuple[Tensor, ...]
    times: int = 1


def names(program: Program) -> Names:
    """What optimizers tell apart."""
    model = program.model
    wide = frozenset(
        weight.name
        for module in model.embed
        for weight in module.weights()
        if weight.role == "embedding"
    )
    places = [
        ("", one) for module in (*model.embed, *model.final, model.head) for one in module.linears()
    ]
    places += [
        (model.path(entry.number), one)
        for entry in program.entries
        for one in entry.layer.linears()
    ]
    linear = frozenset((where, f"{one.name}.weight") for where, one in places if not one.conv1d)
    return Names(wide=wide, head=f"{model.head.name}.weight", linear=linear)


def units(body: Body) -> Iterator[Unit]:
    """The modules of a loaded model: what is left to the root (towers), embedding, layers, final
    norm and head. A tied head's table is the embedding's."""
    model, ends = body.model, parameters(body.ends)
    first, last = (
        {id(leaf) for name, leaf in ends if within(name, modules)}
        for modules in (model.embed, (*model.final, model.head))
    )
    idle = idle_layers(body)
    apart = first.union(last, *({id(leaf) for leaf in leaves} for leaves in idle.values()))
    yield Unit(name=ROOT, span="", leaves=tuple(leaf for _, leaf in ends if id(leaf) not in apart))
    yield Unit(name=EMBED, span="", leaves=tuple(leaf for _, leaf in ends if id(leaf) in first))
    for entry, bound in zip(body.program.entries, body.layers, strict=True):
        yield Unit(
            name=bound.prefix,
            span=bound.prefix,
            leaves=tuple(leaf for _, leaf in parameters(bound)),
            times=entry.times,
        )
    for name, leaves in idle.items():
        yield Unit(name=name, span=name, leaves=leaves)
    yield Unit(
        name=TAIL, span="", leaves=tuple(leaf for _, leaf in ends if id(leaf) in last - first)
    )


def idle_layers(body: Body) -> dict[str, tuple[Tensor, ...]]:
    """Layers of the language model's own list that no text passes through, as Llama 3.2 Vision has:
    modules that are never gathered."""
    start = f"{body.model.prefix}."
    found: dict[str, tuple[Tensor, ...]] = {}
    for path, leaf in parameters(body.ends):
        if path.startswith(start):
            name = start + path[len(start) :].partition(".")[0]
            found[name] = (*found.get(name, ()), leaf)
    return found


def stage_units(body: Body, stage: Stage) -> list[frozenset[str]]:
    """Names of the units of each of a rank's stages."""
    return [
        frozenset(
            (
                *([EMBED] if chunk.begins else ()),
                *(bound.prefix for bound in body.layers[chunk.first : chunk.last]),
                *([TAIL] if chunk.ends else ()),
            )
        )
        for chunk in stage.chunks
    ]


def within(path: str, modules: Iterable[Module]) -> bool:
    """Is this the path of one of the modules that hold these modules' weights?"""
    return any(
        path == name
        for module in modules
        for name in [weight.name.rpartition(".")[0] for weight in module.weights()]
    )


def module_leaves(body: Body) -> frozenset[int]:
    """Parameters of linear layers, norms and embeddings, by identity."""
    found: set[int] = set()
    ends = (*body.model.embed, *body.model.final, body.model.head)
    layers = [(entry.layer,) for entry in body.program.entries]
    for bound, modules in zip((body.ends, *body.layers), (ends, *layers), strict=True):
        for module in modules:
            linears = {
                f"{one.name}.{kind}" for one in module.linears() for kind in ("weight", "bias")
            }
            found |= {
                id(bound.tensors[weight.name])
                for weight in module.weights()
                if (weight.name in linears or weight.role in ("norm", "embedding"))
                and weight.name in bound.tensors
            }
    return frozenset(found)


def parameters(bound: Bound) -> list[tuple[str, Tensor]]:
    """Everything that torch would call a parameter, each once, with the path of its module:
    weights, packed ones, adapters, and what is held and never used."""
    found = [(name.rpartition(".")[0], tensor) for name, tensor in bound.parameters()]
    found += [(name, packed.weight) for name, packed in bound.packed.items()]
    adapters = {name: linear.adapter for name, linear in bound.linears.items()} | dict(bound.stacks)
    found += [
        (name, matrix)
        for name, one in adapters.items()
        if one is not None
        for matrix in (one.a, one.b)
    ]
    found += [(tensor.name.rpartition(".")[0], tensor) for tensor in bound.idle]
    return list({id(tensor): (name, tensor) for name, tensor in found}.values())


def leaves(body: Body) -> Iterator[Tensor]:
    """The parameters of the model that is loaded."""
    return (tensor for bound in (body.ends, *body.layers) for _, tensor in parameters(bound))


def known_as_parameters(body: Body, *, whole: bool = False) -> Weights:
    """Weights lie elsewhere than where they were: an `nn.Parameter` is still known for one, its
    transpose is not."""
    all_of = frozenset(map(id, leaves(body)))
    layers = zip(body.program.entries, body.layers, strict=True)
    named = (
        (bound, f"{one.name}.weight")
        for entry, bound in layers
        for one in entry.layer.linears()
        if one.conv1d
    )
    straight = frozenset(id(bound.tensors[name]) for bound, name in named if name in bound.tensors)
    return Weights(parameters=all_of, leaves=all_of, straight=straight, whole=whole)


def unfolded(program: Program, items: Sequence[tuple[str, T]]) -> list[T]:
    """Items by the span that they came from, as often as they stand for: like layers that lie
    together are repeated together."""
    times = {program.model.path(entry.number): entry.times for entry in program.entries}
    out: list[T] = []
    at = 0
    while at < len(items):
        count = times.get(items[at][0], 1)
        end = at + 1
        while count > 1 and end < len(items) and times.get(items[end][0], 1) == count:
            end += 1
        out += [item for _, item in items[at:end]] * count
        at = end
    return out


def gate(r: Recorder, x: Tensor, act: Callable[[], None], *, keeps: bool = False) -> Tensor:
    """x, and `act` in the graph: it is called when x's gradient is there, which goes on as it is.
    Without a graph there is none: then x itself. `keeps`: x is saved for the backward, whatever
    else needs it."""
    if not (r.grad and x.needs):
        return x

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        act()
        return [g]

    return r.node("gate", x.view(*x.shape), (x,), back, (x,) if keeps else ())


@contextmanager
def silently(r: Recorder) -> Iterator[None]:
    """No event is written; what is made here has no block of its own, as on torch's meta device."""
    events, marks, write = len(r.events), len(r.marks), r.write
    r.write = lambda event: None
    try:
        yield
    finally:
        r.write = write
        del r.marks[marks:], r.marked[marks:]
        assert len(r.events) == events
