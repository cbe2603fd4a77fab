"""Loops whose number of iterations depends on sizes (a chunk at a time, a token at a time): found
as a run of calls that repeats as often as a dimension says, and cut down to three iterations, the
first, one of the middle and the last."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from memfit.trace.segments import Made, Piece, Refused

LONGEST = 400  # calls of one iteration
KEPT = 3
SLICE = "aten::slice.Tensor"
ALIKE = {"aten::alias": SLICE}  # of a slice that is the whole tensor


def cut_down(
    runs: Sequence[Piece],
    counts: Sequence[Sequence[int]],
    names: Sequence[str],
    blocks: bool = False,
) -> tuple[list[Piece], list[tuple[int, int, str]]]:
    """The pieces with three iterations each, and the loops as (first call, calls an iteration,
    dimension that counts them). `counts`: the values of `names` in each run. `blocks`: the last
    iteration may be shorter."""
    found: list[tuple[int, int, str]] = []
    pieces = [sliced_once(one) for one in runs] if blocks else list(runs)
    begin = 0
    while len({len(one.calls) for one in pieces}) > 1:
        place = next_loop(pieces, counts, names, begin, latest=blocks)
        if place is None:
            return list(runs), []
        start, period, name = place
        pieces = [
            shortened(piece, start, period, count[names.index(name)])
            for piece, count in zip(pieces, counts, strict=True)
        ]
        found.append(place)
        begin = start + KEPT * period
    return pieces, found


def next_loop(
    runs: Sequence[Piece],
    counts: Sequence[Sequence[int]],
    names: Sequence[str],
    begin: int,
    latest: bool = False,
) -> tuple[int, int, str] | None:
    """The first loop from `begin` on. `latest`: its iterations begin as late as they may, so that
    the last one ends with the loop of the model's code, of which the first iteration is another."""
    tokens = [
        [(ALIKE.get(call.name, call.name), call.where) for call in piece.calls] for piece in runs
    ]
    for start in range(begin, min(map(len, tokens))):
        if any(one[:start][-1:] != tokens[0][:start][-1:] for one in tokens):
            return None
        for number, name in enumerate(names):
            for period in range(1, LONGEST):

                def runs_from(place: int, period: int = period, number: int = number) -> bool:
                    return all(
                        repeats(one, place, period, count[number])
                        for one, count in zip(tokens, counts, strict=True)
                    )

                if runs_from(start):
                    while latest and runs_from(start + 1):
                        start += 1
                    return start, period, name
    return None


def sliced_once(piece: Piece) -> Piece:
    """With one slice where one of another dimension follows that reads nothing else: a shorter last
    iteration slices `x[:n, :n]` twice, others once, since all of a tensor is one alias."""
    read = Counter(one for some in piece.reads for one in some if isinstance(one, int))
    calls = [call.name for call in piece.calls]
    gone = [
        number
        for number, (one, more) in enumerate(itertools.pairwise(calls))
        if one == more == SLICE
        and piece.reads[number + 1] == piece.makes[number]
        and read[piece.makes[number][0]] == 1
    ]
    kept = [number for number in range(len(calls)) if number not in gone]
    source = {piece.makes[number][0]: piece.reads[number][0] for number in gone}
    numbers = {
        value.id: place
        for place, value in enumerate(one for one in piece.values if one.id not in source)
    }

    def now(one: int | str | None) -> int | str | None:
        while one in source:
            one = source[one]
        return numbers[one] if isinstance(one, int) else one

    def whole(one: int | None) -> int | None:
        while one in source:
            one = piece.values[one].of
        return None if one is None else numbers[one]

    return replace(
        piece,
        calls=[piece.calls[number] for number in kept],
        reads=[tuple(map(now, piece.reads[number])) for number in kept],
        makes=[tuple(numbers[one] for one in piece.makes[number]) for number in kept],
        values=[
            replace(
                value,
                id=numbers[value.id],
                of=whole(value.of),
                until=value.until and value.until - bisect_left(gone, value.until),
            )
            for value in piece.values
            if value.id in numbers
        ],
        given={name: numbers[one] for name, one in piece.given.items()},
        left={name: numbers[one] for name, one in piece.left.items()},
    )


def repeats(tokens: Sequence[object], start: int, period: int, count: int) -> bool:
    """Whether `period` calls from `start` on run `count` times, and not once more."""
    end = start + period * count
    if end > len(tokens) or count < 2:
        return False
    if tokens[start + period] != tokens[start]:
        return False
    body = tokens[start : start + period]
    return all(
        tokens[at : at + period] == body for at in range(start + period, end, period)
    ) and tokens[end : end + period] != list(body)


def shortened(piece: Piece, start: int, period: int, count: int) -> Piece:
    """Without the iterations between the second and the last."""
    if count < KEPT:
        raise Refused(f"`{piece.name}` has {count} iterations of a loop, which tell too little")
    gone = range(start + 2 * period, start + (count - 1) * period)
    lost = {value for call in gone for value in piece.makes[call]}
    # an outside value that only lost iterations read is lost as well
    numbers: dict[int, int] = {}
    values: list[Made] = []
    for value in piece.values:
        if value.id in lost:
            continue
        numbers[value.id] = len(values)
        values.append(value)
    twins: dict[int, int] = {}  # of the iteration before the last: those of the second
    for place in range(period):
        before = piece.makes[start + (count - 2) * period + place]
        twins |= dict(zip(before, piece.makes[start + period + place], strict=True))
    last = range(start + (count - 1) * period, start + count * period)
    made = {value: call for call, some in enumerate(piece.makes) for value in some}

    def seen(one: int, call: int) -> int:
        """A value as the last iteration sees it, which follows the second now."""
        return numbers[twins[one] if one in lost and call in last and one in twins else one]

    for value in values:
        if value.of in lost and not (made[value.id] in last and value.of in twins):
            raise Refused(f"`{piece.name}`: a value of the loop is a view of another iteration's")

    second = range(start + period, start + 2 * period)

    def moved(value: int, until: int | None) -> int | None:
        if until is None or until <= gone.start:
            return until
        if until > gone.stop:
            return until - len(gone)
        if made.get(value, -1) in second and until <= gone.start + period:
            return until  # in the iteration that follows, which is the last one now
        return gone.start

    kept = [number for number in range(len(piece.calls)) if number not in gone]
    return Piece(
        name=piece.name,
        calls=[piece.calls[number] for number in kept],
        reads=[
            tuple(
                seen(one, number) if isinstance(one, int) else one
                for one in piece.reads[number]
                if one not in lost or (number in last and one in twins)
            )
            for number in kept
        ],
        makes=[tuple(numbers[one] for one in piece.makes[number]) for number in kept],
        values=[
            Made(
                id=numbers[value.id],
                ref=value.ref,
                of=None if value.of is None else seen(value.of, made.get(value.id, -1)),
                until=moved(value.id, value.until),
                gone=value.gone,
            )
            for value in values
        ],
        given={name: numbers[one] for name, one in piece.given.items()},
        left={name: numbers[one] for name, one in piece.left.items() if one in numbers},
    )


__all__ = ["cut_down"]
