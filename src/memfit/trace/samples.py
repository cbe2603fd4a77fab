"""What autograd does with one operation, found by running it by itself: which operands it saves,
and what its backward allocates, frees and returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from memfit.graph import Graph, Op, Template
from memfit.graph.solve import Solver, Unsolved
from memfit.lower.captured.run import embedded, operators
from memfit.lower.captured.templates import OWN
from memfit.tape import Free
from memfit.techniques.captured_graphs import is_buffer
from memfit.trace import autocast, cuda, hub_kernels, kernels_of
from memfit.trace.capture import Call, Like
from memfit.trace.recorder import Block, Recorder
from memfit.trace.segments import Piece, Refused

FLOATS = frozenset({"model", "float32", "float64", "bfloat16", "float16", "complex64"})
# Have an operator for some cases only.
SPECIAL = frozenset({"sum.dim_IntList", "index.Tensor", "convolution"})
# Buffers of kernels that depend on sizes by a rule of their own, which operators apply.
RULED = ("partial_sums", "counters", "cublas", "contiguous_")


def templated(
    graphs: dict[str, Graph],
    cut: Sequence[Mapping[str, Piece]],
    places: Mapping[str, str],
    solver: Solver,
    dtype: str,
    passing: Mapping[str, frozenset[str]] | None = None,
) -> dict[str, Graph]:
    """The graphs with a template for every operation that has no operator of its own and may pass
    a gradient on. `places`: the piece that each graph was written from; `passing`: the inputs
    that a gradient goes to, where those are more than `x`."""
    found: dict[str, Graph] = {}
    known: dict[str, dict[str, Template]] = {}
    with sampling():
        for name, graph in graphs.items():
            calls = [run[places[name]].calls for run in cut]
            ops = []
            own = (passing or {}).get(name, ONLY_X)
            for number, op in enumerate(graph.ops):
                masks = sorted(wanted(graph, own)[number])
                masks = ["", *masks] if op.name.startswith(OWN) else masks
                if masks and (op.name not in operators() or op.name in SPECIAL):
                    same = [one[number] for one in calls]
                    key = repr([(one.sample, masks) for one in same])
                    if key not in known:
                        known[key] = templates(op, same, masks, solver, dtype)
                    op = replace(op, templates=known[key])
                ops.append(op)
            found[name] = replace(graph, ops=tuple(ops))
    return found


def with_buffers(
    graphs: dict[str, Graph],
    cut: Sequence[Mapping[str, Piece]],
    places: Mapping[str, str],
    solver: Solver,
    dtype: str,
) -> dict[str, Graph]:
    """The graphs of passes without gradients: what kernels allocate for themselves alone."""
    found: dict[str, Graph] = {}
    known: dict[str, dict[str, Template]] = {}
    with sampling():
        for name, graph in graphs.items():
            calls = [run[places[name]].calls for run in cut]
            ops = []
            for number, op in enumerate(graph.ops):
                if op.name not in operators() or op.name in SPECIAL:
                    same = [one[number] for one in calls]
                    key = repr([one.sample for one in same])
                    if key not in known:
                        own = template(op, same, "", solver, dtype)
                        takes = any(event[0] == "alloc" for event in own.forward)
                        known[key] = {"": own} if takes else {}
                    op = replace(op, templates=known[key])
                ops.append(op)
            found[name] = replace(graph, ops=tuple(ops))
    return found


@contextlib.contextmanager
def sampling() -> Iterator[None]:
    device = cuda.Device(version=tuple(int(one) for one in torch.__version__.split(".")[:2]))  # type: ignore[arg-type]
    kernels_of.install(device)
    emulated = autocast.emulated(device.type)
    with cuda.pretended(device), emulated, kernels_of.forced("sdpa"), hub_kernels.installed():
        SAMPLED[:] = [device]
        yield


SAMPLED: list[Any] = []
_MASKS: dict[int, tuple[Graph, list[set[str]]]] = {}
ONLY_X = frozenset({"x"})


def wanted(graph: Graph, passing: frozenset[str] = ONLY_X) -> list[set[str]]:
    """For each operation, which operands need a gradient: of trained or frozen weights, with and
    without a gradient of the input, and of what embeddings look up (enable_input_require_grads).
    Adapters make results of linear layers need one always."""
    known = _MASKS.get(id(graph))
    if known is not None and known[0] is graph:
        return known[1]
    formats = {one.id: one.format for one in graph.values}
    found: list[set[str]] = [set() for _ in graph.ops]
    leaves = embedded(graph)
    for weights, looked_up in ((True, True), (False, True), (False, False)):
        for given in (True, False):
            needs = {one: given for name, one in graph.inputs.items() if name in passing}
            for number, op in enumerate(graph.ops):
                mask = [
                    weights and not is_buffer(one)
                    if isinstance(one, str)
                    else needs.get(one, False)
                    if one is not None
                    else False
                    for one in op.inputs
                ]
                if op.attrs.get("no_grad"):
                    mask = [False]
                if any(mask):
                    found[number].add("".join("1" if one else "0" for one in mask))
                for one in op.outputs:
                    made = op.name == "linear" or (looked_up and number in leaves)
                    made = made or "leaf" in op.attrs
                    needs[one] = (any(mask) or made) and formats[one] in FLOATS
                    needs[one] = needs[one] and not op.attrs.get("no_grad")
                    needs[one] = needs[one] and not op.name.startswith(UNTOUCHED)
    _MASKS[id(graph)] = graph, found
    return found


# Results have the shape of their operand, and none of its values.
UNTOUCHED = ("zeros_like", "ones_like", "empty_like", "full_like", "new_", "detach", "bernoulli")


def trained_titles(graph: Graph, piece: Piece, given: frozenset[str]) -> set[str]:
    """The values leaving a piece that a gradient goes to when all weights are trained, and those of
    its inputs that are `given`."""
    needs = {one for name, one in graph.inputs.items() if name in given}
    formats = {one.id: one.format for one in graph.values}
    for op in graph.ops:
        touched = any(
            not is_buffer(one) if isinstance(one, str) else one in needs for one in op.inputs
        )
        if (touched or op.attrs.get("leaf")) and not op.attrs.get("no_grad"):
            needs |= {one for one in op.outputs if formats[one] in FLOATS}
    return {title for title, number in piece.left.items() if number in needs}


def templates(
    op: Op, calls: Sequence[Call], masks: Sequence[str], solver: Solver, dtype: str
) -> dict[str, Template]:
    return {mask: template(op, calls, mask, solver, dtype) for mask in masks}


def template(op: Op, calls: Sequence[Call], mask: str, solver: Solver, dtype: str) -> Template:
    seen = [Sample(call, mask).run() for call in calls]
    first = seen[0]
    for other in seen[1:]:
        if [one[:2] for one in other.forward] != [one[:2] for one in first.forward] or [
            one[:2] for one in other.backward
        ] != [one[:2] for one in first.backward]:
            raise Refused(f"the kernels of `{op.name}` differ by size")
        if other.saves != first.saves:
            raise Refused(f"what `{op.name}` saves differs by size")
    try:
        return Template(
            saves=first.saves,
            forward=solved([one.forward for one in seen], solver, dtype),
            backward=solved([one.backward for one in seen], solver, dtype),
            gradients=gradients([one.gradients for one in seen], solver),
        )
    except Unsolved as bad:
        raise Refused(f"`{op.name}` by itself: {bad}") from None


def solved(
    runs: Sequence[list[tuple[Any, ...]]], solver: Solver, dtype: str
) -> tuple[tuple[Any, ...], ...]:
    found = []
    for events in zip(*runs, strict=True):
        first = events[0]
        if first[0] != "alloc":
            found.append(first)
            continue
        kind, name, _, format, op, strides = first
        shape = axes([one[2] for one in events], solver)
        lying = None if strides is None else axes([one[5] for one in events], solver)
        format = "model" if format == dtype else format
        found.append((kind, name, shape, format, op, *((lying,) if lying is not None else ())))
    return tuple(found)


def axes(shapes: Sequence[Sequence[int]], solver: Solver) -> list[str | int]:
    return [solver.solved(sizes) for sizes in zip(*shapes, strict=True)]


def gradients(runs: Sequence[list[Any]], solver: Solver) -> tuple[Any, ...]:
    found: list[Any] = []
    if len({len(one) for one in runs}) > 1:
        raise Unsolved("it reads more tensors in longer sequences")
    for some in zip(*runs, strict=True):
        if some[0] is None:
            found.append(None)
            continue
        names = {one[0] for one in some}
        if len(names) > 1:
            raise Unsolved("gradients differ by size")
        strides = (
            None if any(one[2] is None for one in some) else axes([one[2] for one in some], solver)
        )
        found.append([some[0][0], axes([one[1] for one in some], solver), strides])
    return tuple(found)


def kept(into: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """A hook on what autograd saves that lists it."""
    into.append(tensor)
    return tensor


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Sample:
    """One call on fresh tensors, of which those marked in `mask` need a gradient."""

    def __init__(self, call: Call, mask: str) -> None:
        if call.sample is None:
            raise Refused(f"`{call.name}` cannot be run by itself")
        self.call, self.mask = call, mask
        self.forward: list[tuple[Any, ...]] = []
        self.backward: list[tuple[Any, ...]] = []
        self.gradients: list[Any] = []
        self.saves: tuple[str, ...] = ()
        self.made: list[torch.Tensor] = []
        self.passed: list[torch.Tensor] = []  # the same, or a copy where the call writes into it
        self.names: dict[int, str] = {}  # block -> name

    def run(self) -> Sample:
        func, args, kwargs = self.call.sample
        recorder = Recorder(SAMPLED[0])
        with recorder:
            self.writes = func._schema.is_mutable
            args = self.fresh(args)
            kwargs = {key: self.fresh(value) for key, value in kwargs.items()}
            for number, one in enumerate(self.passed):
                block = recorder.owned(one)
                if block is not None:
                    self.names[block.id] = f"i{number}"
            packed: list[torch.Tensor] = []

            first = len(recorder.events)
            with torch.autograd.graph.saved_tensors_hooks(partial(kept, packed), same):
                result = func(*args, **kwargs)
            outs = [
                one
                for one in (result if isinstance(result, (tuple, list)) else (result,))
                if isinstance(one, torch.Tensor)
            ]
            self.told_forward(recorder, recorder.events[first:], outs)
            self.saves = tuple(self.name_of(recorder, one) for one in packed)
            self.went_back(recorder, outs)
            del packed, outs, result, args, kwargs
        return self

    def fresh(self, value: Any) -> Any:
        if isinstance(value, Like):
            number = len(self.made)
            needs = number < len(self.mask) and self.mask[number] == "1"
            made = (
                torch.zeros(value.shape, dtype=value.dtype, device="cuda")
                if value.real and not value.dtype.is_floating_point
                else torch.empty_strided(
                    value.shape, value.strides, dtype=value.dtype, device="cuda"
                )
            )
            if value.chosen:
                made.view(-1)[: value.chosen] = True
            if needs:
                made.requires_grad_(True)
            self.made.append(made)
            self.passed.append(made.clone() if needs and self.writes else made)
            return self.passed[-1]
        if isinstance(value, (tuple, list)):
            return type(value)(self.fresh(one) for one in value)
        return value

    def told_forward(self, recorder: Recorder, events: Sequence[Any], outs: Sequence[Any]) -> None:
        blocks = [recorder.owned(one) for one in outs]
        for number, block in enumerate(blocks):
            if block is not None and block.id not in self.names:
                self.names[block.id] = f"o{number}"
        self.forward = self.told(events, "n")
        for number, block in enumerate(blocks):
            name = "" if block is None else self.names[block.id]
            if name != f"o{number}":  # a view of an operand
                place = int(name[1:]) if name[:1] == "i" else 0
                self.forward.append(("out", number, place))

    def told(self, events: Sequence[Any], letter: str) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        skipped: set[int] = set()
        for event in events:
            if isinstance(event, Block):
                if any(f": {name}" in event.op for name in RULED):
                    skipped.add(event.id)
                    continue
                name = self.names.get(event.id)
                if name is not None and name[0] == "o":
                    found.append(("out", int(name[1:])))
                    continue
                name = self.names.setdefault(event.id, f"{letter}{len(self.names)}")
                format = event.formula.rpartition(" ")[2] if event.formula else "uint8"
                shape = tuple(event.shape) if event.formula else (event.size,)
                if not event.formula or "]" not in event.formula:
                    format, shape = "uint8", (event.size,)
                found.append(("alloc", name, shape, format, event.op.partition(".")[0], None))
            elif isinstance(event, Free) and event.id not in skipped:
                name = self.names.get(event.id, "i")
                if name[0] not in "io":
                    found.append(("free", name))
        return found

    def name_of(self, recorder: Recorder, tensor: torch.Tensor) -> str:
        block = recorder.owned(tensor)
        return "" if block is None else self.names.get(block.id, "")

    def went_back(self, recorder: Recorder, outs: list[torch.Tensor]) -> None:
        graph = [one for one in outs if one.requires_grad]
        if not graph:
            return
        wanted = [one for one in self.made if one.requires_grad]
        seeds = [torch.empty_like(one) for one in graph]
        seed_blocks = [recorder.owned(one) for one in seeds]
        for block in seed_blocks:
            if block is None:
                raise Refused(f"the gradient of `{self.call.name}` has no memory of its own")
            self.names[block.id] = "g"
        before = len(recorder.events)
        recorder.phase = "backward"
        given = torch.autograd.grad(graph[:1], wanted, seeds[:1], allow_unused=True)
        self.backward = [
            one for one in self.told(recorder.events[before:], "b") if one != ("free", "g")
        ]
        by_leaf = dict(zip(map(id, wanted), given, strict=True))
        for one in self.made:
            gradient = by_leaf.get(id(one))
            if gradient is None:
                self.gradients.append(None)
                continue
            name = self.name_of(recorder, gradient)
            lying = None if gradient.is_contiguous() else tuple(gradient.stride())
            self.gradients.append((name, tuple(gradient.shape), lying))


__all__ = ["templated"]
