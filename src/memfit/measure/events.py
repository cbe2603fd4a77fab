"""Event by event: which allocations of a run its prediction has, which it lacks, and which it has
too many. What is lacking on a GPU is a row that `kernels.py` lacks."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from memfit.lazy_dataclass import dataclass
from memfit.tape import Alloc, Mark, Tape

SMALLEST = 512  # bytes: a block of CUDA's allocator; smaller ones are numbers, counters, seeds
Place = tuple[str, int]  # phase and step
ANSWERING = ("prefill", "decode")  # a token is no step of a meter's


class Kind(NamedTuple):
    """Allocations alike, and how many they are."""

    phase: str
    op: str
    size: int
    times: int

    @property
    def bytes(self) -> int:
        return self.size * self.times


@dataclass(frozen=True, kw_only=True)
class Compared:
    """`same` of all that was measured, in number and in bytes; the kinds that one side alone has,
    the largest first."""

    events: int
    same: int
    bytes: int
    same_bytes: int
    missed: tuple[Kind, ...]
    extra: tuple[Kind, ...]

    @property
    def share(self) -> float:
        return self.same / self.events if self.events else 1.0


def compare(measured: Tape, predicted: Tape) -> Compared:
    """Within a phase of a step, allocations of one size are the same, in whatever order they came;
    the rest is on one side only. Loading is left out: the order of weights says nothing."""
    ours, theirs = places(predicted), places(measured)
    missed: Counter[tuple[str, str, int]] = Counter()
    extra: Counter[tuple[str, str, int]] = Counter()
    same = same_bytes = 0
    for place in dict.fromkeys([*theirs, *ours]):
        there, here = theirs.get(place, []), ours.get(place, [])
        both = Counter(one.size for one in there) & Counter(one.size for one in here)
        same, same_bytes = (
            same + both.total(),
            same_bytes + sum(size * times for size, times in both.items()),
        )
        lacking(missed, there, both, place[0])
        lacking(extra, here, both, place[0])
    every = [one.size for found in theirs.values() for one in found]
    return Compared(
        events=len(every),
        same=same,
        bytes=sum(every),
        same_bytes=same_bytes,
        missed=kinds(missed),
        extra=kinds(extra),
    )


def lacking(
    into: Counter[tuple[str, str, int]], found: list[Alloc], both: Counter[int], phase: str
) -> None:
    left = Counter(both)
    for one in found:
        if left[one.size]:
            left[one.size] -= 1
        else:
            into[phase, one.op, one.size] += 1


def kinds(found: Counter[tuple[str, str, int]]) -> tuple[Kind, ...]:
    return tuple(
        sorted(
            (Kind(*key, times) for key, times in found.items()), key=lambda one: (-one.bytes, one)
        )
    )


def places(tape: Tape) -> dict[Place, list[Alloc]]:
    found: dict[Place, list[Alloc]] = {}
    place: Place = ("load", 0)
    for event in tape:
        if type(event) is Mark:
            place = (event.phase, 0 if event.phase in ANSWERING else event.step)
        elif type(event) is Alloc and event.size >= SMALLEST and place[0] != "load":
            found.setdefault(place, []).append(event)
    return found


__all__ = ["Compared", "Kind", "compare"]
