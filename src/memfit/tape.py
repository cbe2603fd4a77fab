"""The tape: an ordered list of what happens on one rank. Producers write it, simulators read it.

`check` is the runnable definition of a legal tape. Sizes are the bytes a program asked for;
rounding is the allocator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any, Literal, NamedTuple, TypeAlias

from memfit.errors import Problem, TapeError
from memfit.lazy_dataclass import dataclass

Part = Literal[
    "weights",
    "gradients",
    "optimizer",
    "master",
    "activations",
    "logits",
    "kv_cache",
    "temporaries",
    "workspace",
    "buffers",
    "inputs",
    "communication",
]
PARTS: tuple[Part, ...] = (
    "weights",
    "gradients",
    "optimizer",
    "master",
    "activations",
    "logits",
    "kv_cache",
    "temporaries",
    "workspace",
    "buffers",
    "inputs",
    "communication",
)
Phase = Literal[
    "load", "prepare", "forward", "backward", "step", "evaluate", "save", "prefill", "decode"
]
PHASES: tuple[Phase, ...] = (
    "load",
    "prepare",
    "forward",
    "backward",
    "step",
    "evaluate",
    "save",
    "prefill",
    "decode",
)


class Alloc(NamedTuple):
    """A block comes to life. `formula` is the working: factors to multiply (shape, then bytes of
    one value), or a text where a trace saw it."""

    id: int
    size: int
    part: Part
    where: str = ""
    op: str = ""
    formula: str | tuple[int, ...] = ""
    stream: int = 0


class Free(NamedTuple):
    """Returns the block `id` to the allocator. Other `streams` have used it (torch's
    `record_stream`), so it is reused only after a `Sync` with each of them."""

    id: int
    streams: tuple[int, ...] = ()


class Compute(NamedTuple):
    """A kernel: its arithmetic, the bytes it moves, and the math type that sets its rate; or so
    many alike that share them."""

    op: str
    flops: int
    bytes: int
    math: str = ""
    where: str = ""
    stream: int = 0
    kernels: int = 1


class Comm(NamedTuple):
    """A collective or a transfer: `size` bytes as the call states them, over `ranks` ranks of
    `group`."""

    op: str
    size: int
    ranks: int
    group: str = ""
    where: str = ""
    stream: int = 0


class Sync(NamedTuple):
    """`stream` waits for `waits_for`; freed blocks that were kept back because of `waits_for` may
    be used again, but for the last `behind` of them, which were freed after what is waited for."""

    stream: int
    waits_for: int
    behind: int = 0


class Trim(NamedTuple):
    """Every segment that holds no live block goes back to the driver (`torch.cuda.empty_cache`);
    all streams are waited for."""


LONGEST = -1  # the step of the longest batch, which may come at any time


class Mark(NamedTuple):
    """From here on it is `phase` (of step `step`), in `where` (a module path, or empty)."""

    phase: Phase
    where: str = ""
    step: int = 0


Event: TypeAlias = Alloc | Free | Compute | Comm | Sync | Trim | Mark
Source = Literal["formula", "trace", "measured", "handwritten"]


@dataclass(frozen=True, kw_only=True)
class Tape:
    """What happens on one rank, in order.

    A compact tape stands for a longer one: `repeats[k]` says that the events of the span (first,
    last) of index k happen `times` times, once for each of the identical layers they stand for;
    blocks that layers hand to one another or share make some events of a span odd. Live sums are
    exact on a compact tape; a replay of the allocator needs a flat one (`repeats` empty). `notes`
    say what the producer took for granted; `parameters` are those of the model and those trained,
    where the producer counted them. `short`: the compact tape that a flat one was written from.
    """

    events: tuple[Event, ...]
    source: Source
    rank: int = 0
    repeats: tuple[Repeat, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Problem, ...] = ()
    parameters: tuple[int, int] = (0, 0)
    short: Tape | None = field(default=None, repr=False, compare=False)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)


NOTHING = Sync(
    0,
    0,
    # a stream that waits for itself: holds the place of an event that happens in other runs of a
    # span
)


class Odd(NamedTuple):
    """The event at `place` happens in one run of its span alone, the first (0) or the last (-1); in
    the others, `instead` does."""

    place: int
    run: int
    instead: Event


class Repeat(NamedTuple):
    """Events `first` up to (not including) `last` stand for `times` runs of themselves, which are
    identical but for what is `odd`."""

    first: int
    last: int
    times: int
    odd: tuple[Odd, ...] = ()

    def runs(self) -> tuple[tuple[int, int], ...]:
        """(number of the first one, how many) of runs that are alike, in order."""
        if not self.odd or self.times == 1:
            return ((0, self.times),)
        inner = ((1, self.times - 2),) if self.times > 2 else ()
        return ((0, 1), *inner, (self.times - 1, 1))

    def happens(self, odd: Odd, run: int) -> bool:
        return run == (0 if odd.run == 0 else self.times - 1)


Producer: TypeAlias = Callable[
    [Any, Any, Any, Any], Tape
]  # (Model, Job, Strategy, Cluster) -> Tape


def check(tape: Tape) -> None:
    """Raise `TapeError` unless the tape is legal: an id names one live block at a time, frees of
    live blocks only, sizes and amounts not negative, known parts and phases, repeats in order and
    disjoint."""
    seen: set[int] = set()
    live: set[int] = set()
    for index, event in enumerate(tape.events):
        match event:
            case Alloc():
                if event.id in live:
                    raise TapeError(
                        f"event {index}: block {event.id} is allocated again while it is alive"
                    )
                if event.size < 0 or event.part not in PARTS:
                    raise TapeError(
                        f"event {index}: block {event.id} has size {event.size} and part "
                        f"`{event.part}`"
                    )
                seen.add(event.id)
                live.add(event.id)
            case Free():
                if event.id not in live:
                    raise TapeError(f"event {index}: block {event.id} is freed but not alive")
                live.remove(event.id)
            case Compute():
                if event.flops < 0 or event.bytes < 0 or event.kernels < 1:
                    raise TapeError(f"event {index}: `{event.op}` computes a negative amount")
            case Comm():
                if event.size < 0 or event.ranks < 1:
                    raise TapeError(
                        f"event {index}: `{event.op}` moves {event.size} bytes over "
                        f"{event.ranks} ranks"
                    )
            case Mark():
                if event.phase not in PHASES:
                    raise TapeError(f"event {index}: unknown phase `{event.phase}`")
            case Sync() | Trim():
                pass
    _check_repeats(tape, seen)


def _check_repeats(tape: Tape, seen: set[int]) -> None:
    end = 0
    for repeat in tape.repeats:
        if not (end <= repeat.first <= repeat.last <= len(tape.events)) or repeat.times < 1:
            raise TapeError(f"{repeat} overlaps another or leaves the tape")
        end = repeat.last
        for odd in repeat.odd:
            if not (repeat.first <= odd.place < repeat.last) or odd.run not in (0, -1):
                raise TapeError(f"{odd} is outside of its span, or of no run that it can be of")
            if isinstance(odd.instead, Free) and odd.instead.id not in seen:
                raise TapeError(f"{odd} frees a block that never was")
