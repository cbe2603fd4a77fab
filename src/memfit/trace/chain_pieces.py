"""Cuts a forward pass of an encoder, or of an encoder and a decoder, into pieces: what comes before
the layers, each layer, what runs between two lists of layers, and all that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memfit.trace.capture import Call, Run
from memfit.trace.paths import layer_of
from memfit.trace.segments import FINAL, START, Builder, Piece, Refused, key

MIDDLE = "middle"
ENDS = frozenset({START, MIDDLE, FINAL})


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The pieces of one run in their order. `results`: where the value lies that the model returns
    under a name: a piece, and the value's number."""

    pieces: Mapping[str, Piece]
    results: Mapping[str, tuple[str, int]]
    history: bool = False  # every layer's result is kept until the last one has run
    late: frozenset[str] = frozenset()  # what layers return and nobody reads

    @property
    def layers(self) -> list[str]:
        return [name for name in self.pieces if name not in ENDS]


def chain_of(run: Run) -> Chain:
    """The pieces; where a loop keeps every layer's result until it is over, that is said once, and
    not for each of them."""
    found = cut(run, frozenset())
    results = {f"{place}:{number}" for place, number in found.results.values()}
    follow = set(carried(found).values()) - results
    kept = {
        title
        for piece in found.pieces.values()
        for title in piece.unread
        if title in follow and title.rpartition(":")[0] not in ENDS
    }
    return cut(run, frozenset(kept)) if kept else found


def cut(run: Run, ignored: frozenset[str]) -> Chain:
    """The pieces, without what lets go of the ignored values."""
    builder = Builder(run, frozenset({MIDDLE, FINAL}))
    last = before = START
    late: set[str] = set()
    for one, name in zip(run.log, segment_names(run.log), strict=True):
        if isinstance(one, int):
            owner = builder.root.get(one)
            own = owner is not None and owner[0] == last  # its variables go when it has returned
            builder.now = last if own and not builder.piece(name).calls else name
            title = "" if owner is None else f"{owner[0]}:{owner[1]}"
            read = owner is not None and name in ENDS and (name, *owner) in builder.outside
            loops = owner is not None and owner[0] == before not in ENDS and not read
            if title in ignored or loops:
                builder.now = ""  # what a loop over layers lets go when it is over
                if title not in ignored and list_of(before) == list_of(last):
                    late.add(title)
            builder.freed(one)
        else:
            builder.call(one, name)
            before, last = (last, name) if name != last else (before, last)
    results: dict[str, tuple[str, int]] = {}
    for name, ref in run.results.items():
        place = builder.latest.get(key(ref)) or builder.root.get(ref.block)
        if place is not None:
            results[name] = place
    pieces = builder.finished()
    return Chain(
        pieces=pieces, results=results, history=bool(ignored), late=unread_results(pieces, late)
    )


def unread_results(pieces: Mapping[str, Piece], found: set[str]) -> frozenset[str]:
    """Of what goes when the next layer has returned, that which no layer reads. The last layer's
    goes when it returns itself; in its graph, as in the others, it does not."""
    read = {title for piece in pieces.values() for title in piece.given}
    late = {title for title in found if title not in read}
    names = [name for name in pieces if name not in ENDS]
    for name, after in zip(names, [*names[1:], ""], strict=True):
        if list_of(name) == list_of(after):
            continue
        piece = pieces[name]
        alike = [one for one in late if list_of(one) == list_of(name)]
        for number in {int(one.rpartition(":")[2]) for one in alike}:
            if number < len(piece.values) and piece.values[number].until == len(piece.calls):
                piece.values[number].until = None
                late.add(f"{name}:{number}")
    return frozenset(late)


def segment_names(log: Sequence[Call | int]) -> list[str]:
    """The piece that each entry belongs to. What runs between two layers of one list belongs to the
    first of them."""
    layers = [layer_of(one.where) if isinstance(one, Call) else "" for one in log]
    ahead = [""] * len(log)
    following = ""
    for index in range(len(log) - 1, -1, -1):
        ahead[index] = following
        following = layers[index] or following
    found: list[str] = []
    now, last = START, ""
    for layer, following in zip(layers, ahead, strict=True):
        if layer:
            now = last = layer
        elif last and not following:
            now = FINAL
        elif last and list_of(following) != list_of(last):
            now = MIDDLE
        found.append(now)
    return found


def passed_on(chain: Chain, follow: Mapping[str, str]) -> str:
    """The encoder's result, where what stands between the lists does not touch it."""
    title = follow.get(MIDDLE, "")
    middle = chain.pieces.get(MIDDLE)
    return "" if middle is None or title in middle.given else title


def list_of(layer: str) -> str:
    return layer.rpartition(".")[0]


def carried(chain: Chain) -> dict[str, str]:
    """For each piece but the first, the title of the value that goes on as its `x`: of those that
    the piece before made for nobody else."""
    names = list(chain.pieces)
    readers: dict[str, list[str]] = {}
    for name, piece in chain.pieces.items():
        for title in piece.given:
            if title not in piece.unread:
                readers.setdefault(title, []).append(name)
    found: dict[str, str] = {}
    for before, name in pairwise(names):
        own = [
            title
            for title in chain.pieces[name].given
            if title.rpartition(":")[0] == before and readers.get(title) == [name]
        ]
        if name == MIDDLE and not own:  # the decoder's layers read it, and nothing before them
            own = [title for title in readers if title.rpartition(":")[0] == before]
        if len(own) != 1:
            raise Refused(f"`{name}` takes {len(own)} values that `{before}` made for it alone")
        found[name] = own[0]
    return found


__all__ = ["ENDS", "MIDDLE", "Chain", "carried", "chain_of", "list_of", "passed_on"]
