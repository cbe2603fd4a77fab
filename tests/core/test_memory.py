"""Peaks and parts of hand-written tapes, whose numbers anyone can add up; compact tapes say the
same as flat ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import TapeError
from memfit.simulate.memory import Memory, blocks, memory, starred
from memfit.simulate.replay import replay
from memfit.tape import LONGEST, NOTHING, Alloc, Event, Free, Mark, Odd, Part, Repeat, Tape, check
from memfit.units import KIB, MIB


def tape(*events: Event, repeats: tuple[Repeat, ...] = ()) -> Tape:
    made = Tape(events=events, source="handwritten", repeats=repeats)
    check(made)
    return made


def flat(compact: Tape) -> Tape:
    """The tape that a compact one stands for: every run of a span with ids of its own, a `Free` in
    there for the oldest block of its id, one behind it for the newest."""
    events: list[Event] = []
    live: dict[int, list[int]] = {}

    def emit(part: Iterable[Event], oldest: int = -1) -> None:
        for event in part:
            if isinstance(event, Alloc):
                live.setdefault(event.id, []).append(len(events))
                events.append(event._replace(id=len(events)))
            else:
                events.append(
                    Free(live[event.id].pop(oldest)) if isinstance(event, Free) else event
                )

    at = 0
    for first, last, times, odd in compact.repeats:
        emit(compact.events[at:first])
        for run in range(times):
            instead = {one.place: one.instead for one in odd if run != one.run % times}
            emit((instead.get(index, compact.events[index]) for index in range(first, last)), 0)
        at = last
    emit(compact.events[at:])
    return tape(*events)


def same(one: Memory, other: Memory) -> None:
    assert one.allocated == other.allocated
    assert one.parts == other.parts
    assert one.groups == other.groups
    assert one.timeline == other.timeline
    assert one.end == other.end


def test_an_empty_tape_holds_nothing() -> None:
    found = memory(tape(Mark("load")))
    assert (found.allocated, found.at, found.parts, found.groups, found.end) == (0, None, {}, (), 0)
    assert [(one.phase, one.allocated) for one in found.timeline] == [("load", 0)]


def test_blocks_are_rounded_one_by_one_and_parts_sum_to_the_peak() -> None:
    found = memory(
        tape(
            Mark("load"),
            Alloc(0, 1, "weights"),
            Alloc(1, 513, "buffers"),
            Alloc(2, 1024, "weights"),
        )
    )
    assert found.allocated == 512 + 1024 + 1024
    assert found.parts == {"weights": 1025, "buffers": 513, "rounding": 511 + 511}
    assert found.end == found.allocated


def test_the_peak_knows_its_moment() -> None:
    found = memory(
        tape(
            Mark("load"),
            Alloc(0, 4096, "weights", "embed"),
            Mark("forward", "layers.0", 3),
            Alloc(1, 1024, "activations", "layers.0.mlp", "silu"),
            Free(1),
            Alloc(2, 512, "inputs"),
        )
    )
    assert found.at is not None
    assert (found.at.phase, found.at.step, found.at.where, found.at.op, found.at.index) == (
        "forward",
        3,
        "layers.0.mlp",
        "silu",
        3,
    )


def test_a_peak_without_a_module_is_placed_by_its_mark() -> None:
    found = memory(tape(Mark("step", "layers.7", 1), Alloc(0, 512, "optimizer", op="state")))
    assert found.at is not None
    assert (found.at.where, found.at.op) == ("layers.7", "state")


def test_activations_that_do_not_outlive_their_phase_are_temporaries() -> None:
    found = memory(
        tape(
            Mark("forward"),
            Alloc(0, 512, "activations", op="saved"),
            Alloc(1, 1024, "activations", op="inner"),
            Free(1),
            Mark("forward", "layers.1"),
            Alloc(2, 2048, "activations", op="freed after the peak"),
            Free(2),
            Mark("backward"),
            Free(0),
        )
    )
    assert found.allocated == 512 + 2048
    assert found.parts == {"temporaries": 2048, "activations": 512, "rounding": 0}


def test_a_second_forward_of_one_step_is_another_phase() -> None:
    """With accumulation the order is forward, backward, forward: what the first forward saved and
    nobody freed is no temporary."""
    found = memory(
        tape(
            Mark("forward"),
            Alloc(0, 512, "activations"),
            Mark("backward"),
            Alloc(1, 512, "gradients"),
            Mark("forward"),
            Alloc(2, 4096, "activations"),
            Free(0),
        )
    )
    assert found.parts == {"activations": 512 + 4096, "gradients": 512, "rounding": 0}


def test_phases_have_peaks_and_moments_names() -> None:
    found = memory(
        tape(
            Mark("load"),
            Alloc(0, 512, "weights"),
            Mark("prepare"),
            Alloc(1, 512, "weights"),
            Mark("forward"),
            Alloc(2, 1024, "activations"),
            Mark("backward"),
            Free(2),
            Mark("forward"),
            Alloc(3, 4096, "activations"),
            Mark("backward"),
            Free(3),
            Mark("step"),
            Alloc(4, 512, "optimizer"),
            Mark("forward", step=1),
            Mark("evaluate", step=1),
            Alloc(5, 512, "logits"),
            Mark("save", step=1),
        )
    )
    assert [(one.moment, one.phase, one.step, one.allocated) for one in found.timeline] == [
        ("load", "load", 0, 512),
        ("load", "prepare", 0, 1024),
        ("first step", "forward", 0, 5120),
        ("first step", "backward", 0, 5120),
        ("first step", "step", 0, 1536),
        ("steady step", "forward", 1, 1536),
        ("evaluate", "evaluate", 1, 2048),
        ("save", "save", 1, 2048),
    ]


def test_what_is_prepared_between_steps_is_one_of_them() -> None:
    """Before the first forward it is a part of the load."""
    marks = (("prepare", 0), ("forward", 0), ("prepare", 1), ("forward", 1), ("forward", LONGEST))
    found = memory(tape(Mark("load"), *(Mark(phase, step=step) for phase, step in marks)))
    assert [(one.moment, one.phase) for one in found.timeline] == [
        ("load", "load"),
        ("load", "prepare"),
        ("first step", "forward"),
        ("steady step", "prepare"),
        ("steady step", "forward"),
        ("longest batch", "forward"),
    ]


def test_blocks_alike_stand_together() -> None:
    events = [
        Alloc(k, 1024, "weights", f"model.layers.{k}.mlp.up_proj", "parameter", (256, 2, 2))
        for k in range(5)
    ]
    found = memory(tape(Mark("load"), *events, Alloc(9, 64, "buffers", "model.rotary")))
    assert [(one.where, one.times, one.bytes) for one in found.groups] == [
        ("model.layers.*.mlp.up_proj", 5, 5120),
        ("model.rotary", 1, 64),
    ]
    assert starred("h.11.attn.c_attn") == "h.*.attn.c_attn"


# ----------------------------------------------------------------------------------------- compact
def layers(times: int) -> Tape:
    """Load, forward and backward of `times` equal layers: activations pile up, gradients come as
    they go."""
    return tape(
        Mark("load", "0"),
        Alloc(0, 3000, "weights", "0"),
        Mark("forward", "0"),
        Alloc(1, 700, "activations", "0", "saved"),
        Alloc(2, 9000, "activations", "0", "inner"),
        Free(2),
        Mark("backward", "0"),
        Alloc(3, 3000, "gradients", "0"),
        Free(1),
        Mark("step"),
        Alloc(4, 100, "workspace"),
        repeats=(Repeat(0, 2, times), Repeat(2, 6, times), Repeat(6, 9, times)),
    )


@pytest.mark.parametrize("times", [1, 2, 5, 32])
def test_a_compact_tape_says_what_the_flat_one_says(times: int) -> None:
    compact = layers(times)
    one, other = memory(compact), memory(flat(compact))
    same(one, other)
    saved = times * (3072 + 1024)
    forward, backward, step = (
        saved + 9216,
        saved + 3072 + (times - 1) * (3072 - 1024),
        times * 2 * 3072 + 512,
    )
    assert [stretch.allocated for stretch in one.timeline] == [
        times * 3072,
        forward,
        backward,
        step,
    ]
    assert one.allocated == max(forward, backward, step)


def test_a_peak_in_a_shrinking_span_is_that_of_its_first_run() -> None:
    compact = tape(
        Mark("load"),
        Alloc(0, 1024, "weights"),
        Mark("forward"),
        Alloc(1, 4096, "activations"),
        Free(1),
        Free(0),
        Mark("step"),
        repeats=(Repeat(0, 2, 8), Repeat(2, 6, 8)),
    )
    found = memory(compact)
    assert (found.allocated, found.run, found.end) == (8 * 1024 + 4096, 0, 0)
    assert found.parts == {"weights": 8 * 1024, "temporaries": 4096, "rounding": 0}
    same(found, memory(flat(compact)))


def test_a_block_that_the_next_layer_frees() -> None:
    """Layer 0 alone, layers 1 to 30 compact, layer 31 alone; each frees what the one before it
    left."""
    compact = tape(
        Mark("forward", "0"),
        Alloc(0, 1000, "activations", "0", "out"),
        Mark("forward", "1"),
        Alloc(1, 1000, "activations", "1", "out"),
        Free(0),
        Mark("forward", "31"),
        Alloc(2, 1000, "activations", "31", "out"),
        Free(1),
        Mark("backward"),
        Free(2),
        repeats=(Repeat(2, 5, 30),),
    )
    found = memory(compact)
    assert found.allocated == 2048
    assert found.parts == {"temporaries": 2000, "rounding": 48}
    assert found.end == 0


def test_like_says_for_how_many_layers_the_peak_stands() -> None:
    at = memory(layers(32)).at
    assert at is not None
    assert (at.phase, at.like) == ("backward", 32)


def test_a_span_over_two_phases_is_refused() -> None:
    with pytest.raises(TapeError, match="from one phase to another"):
        memory(
            tape(
                Mark("load"),
                Alloc(0, 1, "weights"),
                Mark("forward"),
                Alloc(1, 1, "weights"),
                repeats=(Repeat(0, 4, 2),),
            )
        )


def handed(times: int, kept: bool) -> Tape:
    """Layers that hand each other their output: what the first is given lives elsewhere too, what
    the last puts out is freed behind them; one workspace for all; a table that the last to run
    backward frees. `kept`: backward needs the layers' inputs."""
    used = (Free(0), NOTHING) if kept else (NOTHING, Free(0))
    return tape(
        Mark("forward"),
        Alloc(0, 600, "activations", "embed", "out"),
        Alloc(1, 5000, "activations", "", "table"),
        Mark("forward", "0"),
        Alloc(2, 9000, "workspace", "0"),
        Alloc(3, 700, "activations", "0", "saved"),
        Alloc(4, 2000, "activations", "0", "out"),
        used[1],
        Mark("forward"),
        Alloc(5, 100, "logits"),
        Free(4),
        Mark("backward"),
        Free(5),
        Alloc(6, 2000, "temporaries", "", "grad"),
        Mark("backward", "0"),
        Alloc(7, 2500, "temporaries", "0", "grad"),
        Free(6),
        used[0],
        Free(3),
        Free(1),
        Alloc(8, 900, "gradients", "0"),
        Mark("backward"),
        Free(7),
        repeats=(
            Repeat(3, 8, times, (Odd(4, 0, NOTHING), *(() if kept else (Odd(7, 0, Free(4)),)))),
            Repeat(
                14,
                21,
                times,
                (
                    Odd(16, 0, Free(7)),
                    *((Odd(17, -1, Free(4)),) if kept else ()),
                    Odd(19, -1, NOTHING),
                ),
            ),
        ),
    )


@pytest.mark.parametrize("times", [1, 2, 3, 32])
@pytest.mark.parametrize("kept", [False, True])
def test_runs_that_are_not_quite_alike(times: int, kept: bool) -> None:
    compact = handed(times, kept)
    one = memory(compact)
    same(one, memory(flat(compact)))
    held = 5120 + 9216 + times * 1024  # the table, the workspace, what is saved
    forward = held + (1024 + times * 2048 + 512 if kept else 4096 if times > 1 else 1024 + 2048)
    assert one.timeline[0].allocated == forward
    assert one.end == 9216 + times * 1024


def parts(made: Tape, index: int, run: int = 0) -> dict[str, int]:
    found: Counter[str] = Counter()
    for part, block, times in blocks(made, index, run):
        found[part] += block.size * times
    return {part: size for part, size in found.items() if size}


def runs(compact: Tape) -> Iterator[tuple[int, int]]:
    """(event, run) of a compact tape in the order of the flat one."""
    at = 0
    for first, last, times, _ in compact.repeats:
        yield from ((index, 0) for index in range(at, first))
        yield from ((index, run) for run in range(times) for index in range(first, last))
        at = last
    yield from ((index, 0) for index in range(at, len(compact.events)))


@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize(
    "made", [layers, lambda times: handed(times, True), lambda times: handed(times, False)]
)
def test_the_parts_of_every_moment_are_those_of_the_flat_tape(
    made: Callable[[int], Tape], times: int
) -> None:
    """Not at the peak alone: after every event of every run."""
    compact = made(times)
    spread = flat(compact)
    for place, (index, run) in enumerate(runs(compact)):
        assert parts(compact, index, run) == parts(spread, place), (index, run)


def test_an_odd_event_is_one_of_its_span() -> None:
    events = (Mark("load"), Alloc(0, 512, "weights"))
    for odd in (Odd(2, 0, NOTHING), Odd(1, 1, NOTHING), Odd(1, 0, Free(7))):
        with pytest.raises(TapeError, match=r"outside of its span|never was"):
            tape(*events, repeats=(Repeat(0, 2, 3, (odd,)),))


def test_a_number_names_another_block_once_its_own_is_gone() -> None:
    again = (Mark("load"), Alloc(0, 512, "weights"), Free(0), Alloc(0, 1024, "weights"))
    found = memory(tape(*again, Alloc(1, 512, "buffers")))
    assert (found.allocated, found.parts, found.end) == (
        1536,
        {"weights": 1024, "buffers": 512, "rounding": 0},
        1536,
    )
    with pytest.raises(TapeError, match="event 4: block 0 is allocated again while it is alive"):
        tape(*again, Alloc(0, 512, "weights"))


PARTS: tuple[Part, ...] = ("weights", "activations", "gradients", "temporaries")


@st.composite
def compact_tapes(draw: st.DrawFn) -> Tape:
    """Spans of equal runs; what a span keeps, a later span of as many runs may free."""
    events: list[Event] = []
    repeats: list[Repeat] = []
    kept: dict[int, list[int]] = {}
    id = 0
    for _ in range(draw(st.integers(1, 6))):
        times, first = draw(st.sampled_from((1, 2, 5))), len(events)
        events.append(
            Mark(
                draw(st.sampled_from(("load", "forward", "backward"))), step=draw(st.integers(0, 1))
            )
        )
        own: list[int] = []
        for _ in range(draw(st.integers(0, 6))):
            frees = own + kept.get(times, [])
            if frees and draw(st.booleans()):
                gone = draw(st.sampled_from(frees))
                (own if gone in own else kept[times]).remove(gone)
                events.append(Free(gone))
            else:
                events.append(
                    Alloc(
                        id,
                        draw(st.integers(0, 5000)),
                        draw(st.sampled_from(PARTS)),
                        f"layers.{id}",
                        "op",
                    )
                )
                own.append(id)
                id += 1
        kept.setdefault(times, []).extend(own)
        repeats.append(Repeat(first, len(events), times))
    return tape(*events, repeats=tuple(repeats))


@given(compact_tapes())
def test_compact_and_flat_agree_on_any_tape(compact: Tape) -> None:
    one, other = memory(compact), memory(flat(compact))
    assert sum(one.parts.values()) == one.allocated
    assert (one.allocated, one.timeline, one.end) == (other.allocated, other.timeline, other.end)
    assert one.at is None or other.at is None or one.at.op == other.at.op
    assert one.parts == other.parts
    spread = flat(compact)
    for place, (index, run) in enumerate(runs(compact)):
        assert parts(compact, index, run) == parts(spread, place)


# ------------------------------------------------------------------------------------------ replay
def test_with_a_replay_reserved_is_known_and_rounding_covers_what_is_not_split_off() -> None:
    """13.5 MiB get a segment of 14 MiB, whose last half stays with the block (large remainders up
    to 1 MiB are not split)."""
    events = tape(
        Mark("load"),
        Alloc(0, 13 * MIB + 512 * KIB, "weights"),
        Mark("forward"),
        Alloc(1, 1 * KIB, "inputs"),
        Free(1),
    )
    found = memory(events, replay(events))
    assert found.allocated == 14 * MIB + KIB
    assert found.parts == {"weights": 13 * MIB + 512 * KIB, "inputs": KIB, "rounding": 512 * KIB}
    assert found.reserved == 16 * MIB
    assert found.fragmentation == 2 * MIB - KIB
    assert found.reserved_at is not None
    assert found.reserved_at.phase == "forward"
    assert [(one.phase, one.allocated, one.reserved) for one in found.timeline] == [
        ("load", 14 * MIB, 14 * MIB),
        ("forward", 14 * MIB + KIB, 16 * MIB),
    ]
    assert memory(events).allocated == 13 * MIB + 512 * KIB + KIB


def test_a_replay_that_ran_out_of_memory_has_no_peaks_to_tell() -> None:
    events = tape(Mark("load"), Alloc(0, 4 * MIB, "weights"))
    with pytest.raises(TapeError, match="got through"):
        memory(events, replay(events, capacity=MIB))
