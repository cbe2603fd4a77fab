"""Loops whose number of iterations depends on sizes (a chunk at a time, a token at a time): found
as a run of calls that repeats as often as a dimension says, and cut down to three iterations, the
first, one of the middle and the last."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.trace.segments import Made, Piece, Refused

LONGEST = 400  # calls of one iteration
KEPT = 3


def cut_down(
    runs: Sequence[Piece], counts: Sequence[Sequence[int]], names: Sequence[str]
) -> tuple[list[Piece], list[tuple[int, int, str]]]:
    """The pieces with three iterations each, and the loops as (first call, calls an iteration,
    dimension that counts them). `counts`: the values of `names` in each run."""
    found: list[tuple[int, int, str]] = []
    pieces = list(runs)
    begin = 0
    while len({len(one.calls) for one in pieces}) > 1:
        place = next_loop(pieces, counts, names, begin)
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
    runs: Sequence[Piece], counts: Sequence[Sequence[int]], names: Sequence[str], begin: int
) -> tuple[int, int, str] | None:
    tokens = [[(call.name, call.where) for call in piece.calls] for piece in runs]
    for start in range(begin, min(map(len, tokens))):
        if any(one[:start][-1:] != tokens[0][:start][-1:] for one in tokens):
            return None
        for number, name in enumerate(names):
            for period in range(1, LONGEST):
                if all(
                    repeats(one, start, period, count[number])
                    for one, count in zip(tokens, counts, strict=True)
                ):
                    return start, period, name
    return None


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
