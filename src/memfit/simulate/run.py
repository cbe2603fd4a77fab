"""Many steps of different lengths through one allocator: what a whole run reserves, step by step.

A tape has the load, a first step and a steady one, for one length. Here the steady steps of several
tapes follow each other. A step that leaves the layout of the allocator as it was is not replayed
again on that layout: it would leave it so again, with the same peaks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from memfit.errors import TapeError
from memfit.lazy_dataclass import dataclass
from memfit.simulate.allocator import Allocator, OutOfMemory
from memfit.simulate.settings import Settings
from memfit.tape import LONGEST, Alloc, Event, Free, Mark, Sync, Tape, Trim

Slot: TypeAlias = "tuple[str, str, str, int]"  # part, module, op, and which of several alike
Cuts: TypeAlias = (
    "Callable[[int, bool], Cut]"  # by tokens per sequence, and whether it is for the first step
)
ENDS = ("evaluate", "save")  # phases that come between steps, or behind them


class Unit(NamedTuple):
    """Events of a piece of a run, without those that move no memory. Blocks are numbered from 0; a
    block of another unit is named by its `Slot`. `left`: what outlives the unit, by slot; `own`:
    the batch, which goes when the unit is over."""

    events: tuple[Event, ...]
    blocks: int
    taken: dict[int, Slot]  # numbers that stand for blocks of other units
    left: dict[Slot, int]
    own: tuple[int, ...]


class Cut(NamedTuple):
    """A tape in units. `micro`: the micro-batches of a step, the first one and one that finds
    gradients there; `begin` and `began` are those of the first step."""

    load: Unit | None
    began: tuple[Unit, ...]
    begin: Unit | None
    micro: tuple[Unit, ...]
    step: Unit
    evaluate: tuple[Unit, ...]
    merge: tuple[Unit, ...]


class Step(NamedTuple):
    """What a step of a run needed at most, and what the allocator held when it was over."""

    allocated: int
    reserved: int
    retries: int = 0


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The steps that went through; `oom` is the request that ended the run, in step `died`, in its
    phase `died_in`: load, step, or the evaluation or merge after that step. `replays`: how many
    steps were really replayed."""

    steps: tuple[Step, ...]
    load: Step
    evaluation: Step | None
    merge: Step | None
    oom: OutOfMemory | None
    died: int | None
    died_in: str
    replays: int

    @property
    def allocated(self) -> int:
        return max(one.allocated for one in self.all)

    @property
    def reserved(self) -> int:
        return max(one.reserved for one in self.all)

    @property
    def retries(self) -> int:
        return sum(one.retries for one in self.all)

    @property
    def all(self) -> Iterator[Step]:
        yield self.load
        yield from self.steps
        yield from (one for one in (self.evaluation, self.merge) if one is not None)


def cut(tape: Tape, *, first: bool = True) -> Cut:
    """The units of a flat tape of a training job; not `first`: without those before the last step,
    which a run takes from another tape."""
    if tape.repeats:
        raise TapeError("a compact tape cannot be replayed: the allocator needs every event")
    spans = list(_spans(tape))
    steps = sorted({step for kind, step, _, _ in spans if kind == "step" and step != LONGEST})
    if not steps:
        raise TapeError("a run needs a tape with an optimizer step")
    begin, last = steps[0], steps[-1]
    born: dict[int, Slot] = {}
    units: dict[tuple[str, int], list[Unit]] = {}
    for kind, step, start, end in spans:
        if first or step == last or kind in ENDS:
            unit = _unit(tape.events[start:end], born, whole=kind in ("load", "step"))
            units.setdefault((kind, step), []).append(unit)
    ends = {kind: some for (kind, _), some in units.items() if kind in ENDS}
    return Cut(
        load=units["load", 0][0] if first else None,
        began=tuple(units["micro", begin]) if first else (),
        begin=units["step", begin][0] if first else None,
        micro=tuple(units["micro", last]),
        step=units["step", last][0],
        evaluate=tuple(ends.get("evaluate", ())[-1:]),
        merge=tuple(ends.get("save", ())[-1:]),
    )


def _spans(tape: Tape) -> Iterator[tuple[str, int, int, int]]:
    """(kind, step, first event, end) of each unit, in order."""
    kind, step, begin = "load", 0, 0
    phase = "load"
    for place, event in enumerate(tape.events):
        if type(event) is not Mark:
            continue
        turned = (
            "micro"
            if event.phase == "forward" and (phase != "forward" or event.step != step)
            else event.phase
            if event.phase in ("step", "evaluate", "save") and event.phase != phase
            else ""
        )
        phase = event.phase
        if turned:
            if place > begin:
                yield kind, step, begin, place
            kind, step, begin = turned, event.step, place
    if begin < len(tape.events):
        yield kind, step, begin, len(tape.events)


def _unit(events: Sequence[Event], born: dict[int, Slot], *, whole: bool) -> Unit:
    """`born`: blocks of the units before, by their numbers on the tape; those of this one join
    them. `whole`: a batch that was made here stays, because the unit is no micro-batch."""
    alive: dict[int, tuple[int, Alloc]] = {}  # by number on the tape, which may come again
    taken: dict[int, Slot] = {}
    kept: list[Event] = []
    count, new = 0, tuple.__new__
    for event in events:
        if type(event) is Alloc:
            alive[event[0]] = count, event
            kept.append(new(Alloc, (count, *event[1:])))
            count += 1
        elif type(event) is Free:
            if event[0] in alive:
                kept.append(new(Free, (alive.pop(event[0])[0], event[1])))
            elif (slot := born.pop(event.id, None)) is not None and slot[0] != "inputs":
                taken[-1 - len(taken)] = slot
                kept.append(event._replace(id=-len(taken)))
        elif type(event) is Sync or type(event) is Trim:
            kept.append(event)
    left: dict[Slot, int] = {}
    alike: Counter[tuple[str, str, str]] = Counter()
    own: list[int] = []
    for id, (number, block) in alive.items():
        name = block.part, block.where, block.op
        alike[name] += 1
        born[id] = slot = (*name, alike[name])
        if block.part == "inputs" and not whole:
            own.append(number)
        else:
            left[slot] = number
    return Unit(tuple(kept), count, taken, left, tuple(own))


class Run:
    """One allocator, and the units that it goes through."""

    def __init__(self, settings: Settings, capacity: int | None, total: int | None) -> None:
        self.allocator = Allocator(settings, capacity, total=total)
        self.left: dict[Slot, int] = {}  # blocks that outlived their unit
        self.next = 0

    def play(self, unit: Unit) -> OutOfMemory | None:
        allocator, base = self.allocator, self.next
        malloc, free, taken, left = allocator.malloc, allocator.free, unit.taken, self.left
        self.next = base + unit.blocks
        for event in unit.events:
            if type(event) is Alloc:
                failure = malloc(base + event[0], event[1], event[6])
                if failure is not None:
                    return failure
            elif type(event) is Free:
                number = event[0]
                id = base + number if number >= 0 else left.pop(taken[number])
                for stream in event[1]:
                    allocator.record_stream(id, stream)
                free(id)
            elif type(event) is Sync:
                allocator.sync(event.waits_for, event.behind)
            elif type(event) is Trim:
                allocator.empty_cache()
        for number in unit.own:
            free(base + number)
        for slot, number in unit.left.items():
            if slot in left:
                free(left.pop(slot))
            left[slot] = base + number
        return None

    def played(self, units: Iterable[Unit]) -> tuple[Step, OutOfMemory | None]:
        """What units in a row needed."""
        allocator = self.allocator
        allocator.reset_peaks()
        before, failure = allocator.retries, None
        for unit in units:
            failure = self.play(unit)
            if failure is not None:
                break
        return Step(
            allocator.peak_allocated, allocator.peak_reserved, allocator.retries - before
        ), failure

    def step(
        self, cuts: Cuts, lengths: tuple[int, ...], *, first: bool
    ) -> tuple[list[Step], OutOfMemory | None]:
        """The micro-batches, the first of which finds no gradients, and the optimizer."""
        found: list[Step] = []
        for place, tokens in enumerate(lengths):
            cut = cuts(tokens, first)
            micro = cut.began if first else cut.micro
            units = [micro[min(place, len(micro) - 1)]]
            if place == len(lengths) - 1:
                units.append(present(cut.begin) if first else cut.step)
            step, failure = self.played(units)
            found.append(step)
            if failure is not None:
                return found, failure
        return found, None


@dataclass(frozen=True, kw_only=True)
class Course:
    """What is run: the lengths of every step's micro-batches, and after how many steps the run is
    evaluated (0: never), on batches of the `longest` texts. `merged`: adapters are merged into the
    weights at the end."""

    steps: tuple[tuple[int, ...], ...]
    evaluate_every: int = 0
    longest: int = 0
    merged: bool = False


def replay_run(
    cuts: Cuts,
    course: Course,
    settings: Settings,
    capacity: int | None = None,
    *,
    total: int | None = None,
) -> Replayed:
    """Every step in order, until one runs out of memory."""
    run = Run(settings, capacity, total)
    load, failure = run.played([present(cuts(course.steps[0][0], True).load)])
    found: list[Step] = []
    known = _Known()
    replays, evaluation, phase = 0, None, "load"
    for number, lengths in enumerate(course.steps):
        if failure is not None:
            break
        phase = "step"
        step = known.step(lengths) if number else None
        if step is None:
            parts, failure = run.step(cuts, lengths, first=not number)
            replays += 1
            step = merged(parts)
            if failure is None:
                known.learn(lengths, parts, run.allocator.layout(), first=not number)
        if failure is None:
            found.append(step)
        if course.evaluate_every and (number + 1) % course.evaluate_every == 0 and failure is None:
            phase = "evaluation"
            evaluate = cuts(course.longest or lengths[0], False).evaluate
            evaluation, failure = run.played(evaluate)
            known.layout = run.allocator.layout()
    merge = None
    if course.merged and failure is None:
        phase = "merge"
        merge, failure = run.played(cuts(course.steps[-1][-1], False).merge)
    return Replayed(
        steps=tuple(found),
        load=load,
        evaluation=evaluation,
        merge=merge,
        oom=failure,
        died=None if failure is None else len(found) - (phase in ("evaluation", "merge")),
        died_in="" if failure is None else phase,
        replays=replays,
    )


class _Known:
    """Micro-batches that leave the layout as it was. The position of gradients that later
    micro-batches of a step find there is left out: with one micro-batch to a step this is exact."""

    def __init__(self) -> None:
        self.layout: Hashable = None
        self.found: dict[tuple[Hashable, bool, int], Step] = {}

    def step(self, lengths: tuple[int, ...]) -> Step | None:
        """What the step needs, where that is known."""
        parts = []
        for place, tokens in enumerate(lengths):
            one = self.found.get((self.layout, place > 0, tokens))
            if one is None:
                return None
            parts.append(one)
        return merged(parts)

    def learn(
        self, lengths: tuple[int, ...], parts: Sequence[Step], layout: Hashable, *, first: bool
    ) -> None:
        """`parts`: what each micro-batch needed; the last one's with the optimizer's."""
        if not first and layout == self.layout:
            for place, (tokens, part) in enumerate(zip(lengths, parts, strict=True)):
                self.found[layout, place > 0, tokens] = part
        self.layout = layout


def merged(parts: Sequence[Step]) -> Step:
    return Step(
        max(one.allocated for one in parts),
        max(one.reserved for one in parts),
        sum(one.retries for one in parts),
    )


def present(unit: Unit | None) -> Unit:
    if unit is None:
        raise TapeError("the first step needs a tape that is cut with its load")
    return unit
