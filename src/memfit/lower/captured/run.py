"""Runs a graph once its dimensions are numbers: sizes are worked out once per graph and set of
dimensions, then every layer of the kind runs the same steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from memfit.errors import InputError
from memfit.formats import FORMATS, Format
from memfit.graph import Dims, Graph, Op, Value, evaluated, unrolled
from memfit.graph.layer import Template
from memfit.graph.loops import Jump
from memfit.lower.stacks import Replaced
from memfit.lower.strides import normal
from memfit.lower.tensors import Shape, Tensor
from memfit.model.families._captured import CROSSING, PAST
from memfit.tape import Alloc, Event, Free, Part

if TYPE_CHECKING:
    from memfit.lower.bound import Bound
    from memfit.lower.context import Context
    from memfit.lower.recorder import Recorder
    from memfit.model.modules import Linear

Strides: TypeAlias = Shape | None


@dataclass(slots=True, kw_only=True)
class Spec:
    """A result as it was captured: its shape and layout in numbers, its format by name."""

    shape: Shape
    strides: Strides
    format: str
    view: bool
    part: Part | None = None  # where it is not one of the activations


@dataclass(slots=True, kw_only=True)
class Step:
    """One operation with its sizes; `drops` are the values that go once it has run."""

    op: Op
    perform: Run
    silent: bool  # it saves nothing for a backward
    outs: tuple[Spec, ...]
    drops: tuple[int, ...]
    like: int | None  # the value whose format a cast goes back to
    dims: Dims
    runs: bool = True  # not where a result that it makes is not asked for
    follows: bool = False  # its result has the dtype of its operands, all of the model's own
    releases: tuple[str, ...] = ()  # inputs that nothing refers to once it has run
    leaf: bool = False  # it makes the result of an embedding module
    packs: bool = False  # it was captured making a contiguous copy of what was not


Run: TypeAlias = "Callable[[Step, list[Tensor | None], Frame], tuple[Tensor, ...]]"


@dataclass(slots=True, kw_only=True)
class Frame:
    """Whose weights a graph runs on, and where."""

    ctx: Context
    bound: Bound
    linears: Mapping[str, Linear]
    env: dict[int, Tensor]
    replaced: Replaced | None = None  # parameters with adapters of the module that runs
    running: str = ""
    later: Context | None = None

    @property
    def behind(self) -> Context:
        """For backward, which refers to nothing that layers hand to each other."""
        if self.later is None:
            self.later = replace(self.ctx, shared={}, crossing={})
        return self.later

    def enter(self, module: str) -> None:
        """Adapters of a module's own parameters replace them for as long as it runs."""
        if self.replaced is not None and not f"{module}.".startswith(f"{self.running}."):
            self.replaced = None
        names = [name for name in self.bound.stacks if name.rpartition(".")[0] == module]
        if names and self.replaced is None:
            self.running = module
            self.replaced = Replaced(sorted(names), self.bound, self.ctx)

    def weight(self, name: str) -> Tensor | None:
        if self.replaced is not None and name in self.replaced.factors:
            return self.replaced[name]
        found = self.bound.tensors.get(name)
        ends = self.bound.ends
        return ends.tensors.get(name) if found is None and ends is not None else found

    def rate(self, given: float | str) -> float:
        """The rate of a dropout, which a graph may have by the name of its config's field."""
        rates = self.ctx.program.model.graphs.rates if isinstance(given, str) else {}
        return self.ctx.dropout(rates[given] if isinstance(given, str) else given)

    @property
    def casts(self) -> Format | None:
        """The format that autocast casts to, where the graph was captured under it."""
        return None if self.ctx.program.model.encodes else self.ctx.autocast

    def format(self, name: str) -> Format:
        if name == "model":
            return self.casts or FORMATS[self.ctx.program.weights]
        return FORMATS[name]


class Written:
    """A graph with its loops written out, and what follows from it whatever the dimensions are."""

    def __init__(self, graph: Graph, jumps: Sequence[Jump]) -> None:
        self.graph, self.jumps = graph, tuple(jumps)
        self.values = values = {one.id: one for one in graph.values}
        roots: dict[int, list[int]] = {}
        for one in graph.values:
            roots.setdefault(root_of(one.id, values), []).append(one.id)
        until: dict[int, list[int]] = {}
        given = set(graph.inputs.values())
        for root_id, members in roots.items():
            last = values[root_id].until
            if last is not None:
                own = [one for one in members if one not in given]
                until.setdefault(last, []).extend(own)
        letting_go: dict[int, list[str]] = {}
        for name, number in graph.inputs.items():
            moment = values[number].until
            if moment is not None:
                letting_go.setdefault(moment, []).append(name)
        self.unread = tuple(letting_go.get(0, ()))  # of no use to this graph
        self.past = tuple(
            root_of(number, values)
            for name, number in graph.outputs.items()
            if name.startswith(PAST)
        )
        # Made here and left to others, though no output: a cache has these, and so their graph.
        made = {number for op in graph.ops for number in op.outputs} - {*graph.outputs.values()}
        self.cached = tuple(
            one
            for root, members in sorted(roots.items())
            if root in made and values[root].until is None
            for one in members
            if values[one].until is None
        )
        self.crossing: dict[
            int, list[tuple[str, int]]
        ] = {}  # operation -> what it makes for others
        makers = {one: number for number, op in enumerate(graph.ops) for one in op.outputs}
        for name, number in graph.outputs.items():
            if name.startswith(CROSSING):
                self.crossing.setdefault(makers[number], []).append((name, number))
        wide, leaves = upcasts(graph), embedded(graph)
        from memfit.lower.captured.operators import other  # imports this module

        performed = operators()
        self.performers = [performed.get(op.name, other) for op in graph.ops]
        self.drops = [tuple(until.get(number + 1, ())) for number in range(len(graph.ops))]
        self.releases = [tuple(letting_go.get(number + 1, ())) for number in range(len(graph.ops))]
        self.likes = [wide.get(number) for number in range(len(graph.ops))]
        self.follows = [follows(op, values) for op in graph.ops]
        self.leaves = [number in leaves for number in range(len(graph.ops))]
        self.packs = [packs(op, values) for op in graph.ops]

    def steps(self, specs: Mapping[int, Spec], dims: Dims) -> tuple[Step, ...]:
        """Every operation, with the sizes of its results."""
        parts = zip(
            self.graph.ops,
            self.performers,
            self.drops,
            self.likes,
            self.follows,
            self.releases,
            self.leaves,
            self.packs,
            strict=True,
        )
        return tuple(
            [
                Step(
                    op=op,
                    perform=perform,
                    silent=bool(op.attrs.get("no_grad", False)),
                    outs=tuple([specs[one] for one in op.outputs]),
                    drops=drops,
                    like=like,
                    follows=follow,
                    dims=dims,
                    releases=releases,
                    leaf=leaf,
                    packs=pack,
                )
                for op, perform, drops, like, follow, releases, leaf, pack in parts
            ]
        )


class Evaluation:
    """A graph with these dimensions, ready to run."""

    def __init__(self, graph: Graph, dims: Dims, *, few: bool = False) -> None:
        self.written = written = written_out(graph, dims, few)
        self.graph, self.jumps, self.dims = written.graph, written.jumps, dims
        self.unread, self.cached, self.crossing = written.unread, written.cached, written.crossing
        self.shorter: dict[str, Evaluation] = {}
        self.specs = specs_of(self.graph, dims)
        for number in written.past:
            self.specs[number].part = "kv_cache"
        self.steps = written.steps(self.specs, dims)

    def root(self, number: int) -> int:
        """The value whose storage a value has."""
        return root_of(number, self.written.values)

    def uncast(self) -> Evaluation:
        """The same without a cast of its result by the model itself, outside of its modules."""
        graph = self.graph
        last, source = graph.ops[-1], graph.ops[-1].inputs[0]
        ends = last.name == "_to_copy" and graph.outputs["x"] in last.outputs and not last.where
        if not ends or not isinstance(source, int):
            return self
        if "x" not in self.shorter:
            outputs = {**graph.outputs, "x": source}
            shorter = replace(graph, ops=graph.ops[:-1], outputs=outputs)
            self.shorter["x"] = Evaluation(shorter, self.dims)
        return self.shorter["x"]

    def without(self, name: str) -> Evaluation:
        """The same without one result, and without the operations that nothing else needs."""
        if name not in self.shorter:
            outputs = {key: one for key, one in self.graph.outputs.items() if key != name}
            shorter = self.shorter[name] = Evaluation(
                replace(self.graph, outputs=outputs), self.dims
            )
            runs = needed(self.graph, outputs)
            for number, step in enumerate(shorter.steps):
                step.runs = number in runs
        return self.shorter[name]

    def run(
        self,
        given: Mapping[str, Tensor],
        ctx: Context,
        bound: Bound,
        linears: Mapping[str, Linear],
        owner: dict[str, Tensor] | None = None,
        caches: list[Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """The values that leave the graph, by name, but those for later layers, which the context
        gets as soon as they are made. `owner` loses what the graph lets go; `caches` gets what it
        leaves to a cache."""
        if owner is not None:
            for name in self.unread:
                let_go(name, owner)
        env: dict[int, Tensor] = {
            number: given[name]
            for name, number in self.graph.inputs.items()
            if name in given and name not in self.unread
        }
        frame = Frame(ctx=ctx, bound=bound, linears=linears, env=env)
        r = ctx.r
        module = ""
        paths = {"": bound.prefix}
        reached: dict[int, int] = {}  # operation -> how many events were there before it
        begun = {place for jump in self.jumps for place in jump[:2]}
        over = {jump.last: jump for jump in self.jumps}
        for place, step in enumerate(self.steps):
            if place in begun:
                reached[place] = len(r.events)
            where = step.op.where
            if bound.stacks and where != module:
                module = where
                frame.enter(module)
            if where not in paths:
                paths[where] = bound.path(where)
            r.where = paths[where]
            if step.runs:
                execute(step, env, frame)
            if place in self.crossing:
                for name, number in self.crossing[place]:
                    ctx.crossing[name] = env[number]
                    if r.replaying:
                        r.outlive(env[number])
            for number in step.drops:
                env.pop(number, None)
            if step.releases and owner is not None:
                for name in step.releases:
                    env.pop(self.graph.inputs[name], None)
                    let_go(name, owner)
            if place + 1 in over:
                jump = over[place + 1]
                repeat(r, reached[jump.first], reached[jump.second], jump.times)
        if caches is not None:
            caches += [env[number] for number in self.cached if number in env]
        return {
            name: env[number]
            for name, number in self.graph.outputs.items()
            if number in env and not name.startswith(CROSSING)
        }


def let_go(name: str, owner: dict[str, Tensor]) -> None:
    """Take away what a graph lets go, with the other names of its storage: views of a bias that the
    first layer makes for all."""
    gone = owner.pop(name, None)
    if gone is None or gone.storage is None or name == "x":
        return
    for other in [key for key, one in owner.items() if one.storage is gone.storage]:
        if other != "x":
            del owner[other]


def operators() -> Mapping[str, Run]:
    """Every operation that does not run by a template, with its code."""
    from memfit.lower.captured import encoder_operators  # noqa: F401 - it registers itself
    from memfit.lower.captured.operators import OPERATORS

    return OPERATORS


def packs(op: Op, values: Mapping[int, Value]) -> bool:
    """Whether a copy is contiguous, and what it was made of was not."""
    source = op.inputs[0] if op.name == "clone" else None
    if not isinstance(source, int):
        return False
    return values[source].strides is not None and values[op.outputs[0]].strides is None


def specs_of(graph: Graph, dims: Dims) -> dict[int, Spec]:
    """Every value's shape and layout in numbers."""
    known: dict[int | str, int] = {}

    def size(text: int | str) -> int:
        if text not in known:
            known[text] = evaluated(text, dims)
        return known[text]

    found: dict[int, Spec] = {}
    for one in graph.values:
        shape = tuple(map(size, one.shape))
        strides = None if one.strides is None else normal(shape, tuple(map(size, one.strides)))
        found[one.id] = Spec(
            shape=shape, strides=strides, format=one.format, view=one.of is not None
        )
    return found


def repeat(r: Recorder, first: int, second: int, times: int) -> None:
    """Write the events from `second` on `times` more, before themselves. Those from `first` to
    `second` are the same iteration's, one earlier, whose blocks they may free."""
    before, last = r.events[first:second], r.events[second:]
    older = {event.id: at for at, event in enumerate(before) if isinstance(event, Alloc)}
    own = {event.id: at for at, event in enumerate(last) if isinstance(event, Alloc)}
    if [type(one) for one in before] != [type(one) for one in last]:
        raise AssertionError("iterations of a captured loop differ")
    made = {at: id for id, at in older.items()}  # place in the iteration -> block, of the last one
    found: list[Event] = []
    for _ in range(times):
        fresh = {at: r.number() for at in own.values()}
        found += [renumbered(event, own, fresh, older, made) for event in last]
        made = fresh
    same = {at: id for id, at in own.items()}
    r.events[second:] = [*found, *(renumbered(one, own, same, older, made) for one in last)]


def renumbered(
    event: Event,
    own: Mapping[int, int],
    fresh: Mapping[int, int],
    older: Mapping[int, int],
    made: Mapping[int, int],
) -> Event:
    """The event with the blocks of another iteration, and of the one before that."""
    if isinstance(event, Alloc):
        return event._replace(id=fresh[own[event.id]])
    if isinstance(event, Free) and event.id in own:
        return event._replace(id=fresh[own[event.id]])
    if isinstance(event, Free) and event.id in older:
        return event._replace(id=made[older[event.id]])
    return event


def root_of(number: int, values: Mapping[int, Value]) -> int:
    """The value whose storage a value has."""
    while (of := values[number].of) is not None:
        number = of
    return number


def execute(step: Step, env: dict[int, Tensor], frame: Frame) -> None:
    """Run one operation on the values in `env`, and put its results there."""
    args = [
        env.get(one) if type(one) is int else None if one is None else frame.weight(one[1:])  # type: ignore[index]
        for one in step.op.inputs
    ]
    if None in args and step.op.name != "linear":
        check_packed(step, args, frame)
    if step.silent:
        r = frame.ctx.r
        before, r.grad = r.grad, False
        results = step.perform(step, args, frame)
        r.grad = before
    else:
        results = step.perform(step, args, frame)
    if step.leaf:
        program = frame.ctx.program
        if program.input_gradients and within(step.op.where, program.model.embed[0].name):
            for one in results:
                one.needs = True  # enable_input_require_grads, of the input embedding alone
    if len(results) == 1:
        (number,) = step.op.outputs
        env[number] = results[0]
    else:
        env.update(zip(step.op.outputs, results, strict=True))


def check_packed(step: Step, args: list[Tensor | None], frame: Frame) -> None:
    """Code that multiplies a linear layer's weight itself cannot read one that is packed."""
    for one, given in zip(step.op.inputs, args, strict=True):
        name = one[1:].removesuffix(".weight") if isinstance(one, str) else ""
        if given is None and name in frame.linears:
            raise InputError.one(
                f"the model's own code multiplies the weight of `{frame.bound.path(name)}`, which "
                "cannot be packed",
                where="job.quant",
                hint=f"leave it as it is with `--quant-skip {name.rpartition('.')[2]},lm_head`",
            )


def embedded(graph: Graph) -> frozenset[int]:
    """The operations that make the results of embedding modules, which may scale or norm what they
    look up."""
    found = set()
    for number, op in enumerate(graph.ops):
        if op.name == "embedding":
            places = [one.where for one in graph.ops[number:]]
            other = (place for place, where in enumerate(places) if not within(where, op.where))
            found.add(number + next(other, len(places)) - 1)
    return frozenset(found)


def within(place: str, module: str) -> bool:
    """Whether code of a module runs at this place, or of a part of it."""
    return f"{place}.".startswith(f"{module}.")


def needed(graph: Graph, outputs: Mapping[str, int]) -> frozenset[int]:
    """The numbers of the operations that these results need."""
    wanted = set(outputs.values())
    found: set[int] = set()
    for number in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[number]
        if wanted & set(op.outputs):
            found.add(number)
            wanted |= {one for one in op.inputs if isinstance(one, int)}
    return frozenset(found)


# Operations that promote their operands, and under autocast too cast none of them.
PROMOTING = frozenset(
    {"add.Tensor", "sub.Tensor", "mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar", "cat"}
    | {"neg", "clone", "repeat", "silu", "gelu", "sigmoid", "tanh", "relu"}
)


def follows(op: Op, values: Mapping[int, Value]) -> bool:
    """Whether a wider operand than the captured one makes a wider result: 4-bit layers return the
    dtype of their input, where autocast makes 16 bits of it (bitsandbytes 0.50 nn/modules.py
    Linear4bit.forward)."""
    given = [values[one].format for one in op.inputs if isinstance(one, int)]
    return op.name in PROMOTING and bool(given) and set(given) == {"model"}


def upcasts(graph: Graph) -> dict[int, int]:
    """For each cast back to the model's dtype, the value that was cast up before in the same
    module: the code says `x.to(float32)` and later `.to(input_dtype)`."""
    values = {one.id: one for one in graph.values}
    found: dict[int, int] = {}
    known: dict[str, int] = {}
    for number, op in enumerate(graph.ops):
        if op.name != "_to_copy" or not isinstance(op.inputs[0], int):
            continue
        source, target = values[op.inputs[0]].format, values[op.outputs[0]].format
        if source == "model" and target == "float32":
            known.setdefault(op.where, op.inputs[0])
        elif source == "float32" and target == "model" and op.where in known:
            found[number] = known[op.where]
    return found


_WRITTEN: dict[tuple[int, bool, tuple[int, ...]], tuple[Graph, Written]] = {}


def written_out(graph: Graph, dims: Dims, few: bool) -> Written:
    """The graph with its loops written out, from memory where it is known."""
    key = (id(graph), few, tuple([evaluated(loop.count, dims) for loop in graph.loops]))
    known = _WRITTEN.get(key)
    if known is None or known[0] is not graph:
        if len(_WRITTEN) > LIMIT:
            _WRITTEN.clear()
        known = _WRITTEN[key] = (graph, Written(*unrolled(graph, dims, few=few)))
    return known[1]


_KNOWN: dict[tuple[int, bool, tuple[tuple[str, int], ...]], tuple[Graph, Evaluation]] = {}
LIMIT = 256


def evaluation(graph: Graph, dims: Dims, *, few: bool = False) -> Evaluation:
    """The evaluation of a graph, from memory where it is known. `few`: where nothing is saved for a
    backward, iterations of a loop that repeat are written from the events of one."""
    key = (id(graph), few, tuple(sorted(dims.items())))
    known = _KNOWN.get(key)
    if known is None or known[0] is not graph:
        if len(_KNOWN) > LIMIT:
            _KNOWN.clear()
        known = _KNOWN[key] = (graph, Evaluation(graph, dims, few=few))
    return known[1]


__all__ = ["Evaluation", "Frame", "Run", "Spec", "Step", "Template", "evaluation"]
