"""Cuts a forward pass of an encoder, or of an encoder and a decoder, into pieces: what comes before
the layers, each layer, what runs between two lists of layers, and all that follows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from memfit.model.families._chains import HANDED
from memfit.trace.capture import Call, Run
from memfit.trace.paths import TURNS, beside, layer_of
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
    overwritten: Mapping[int, int] = field(default_factory=dict)  # the operation of the next layer
    held: frozenset[str] = frozenset()  # what layers make and the end alone lets go
    leaders: Mapping[str, str] = field(default_factory=dict)  # of a list beside others, the first
    handed: Mapping[str, str] = field(default_factory=dict)  # names of what goes on beside `x`

    @property
    def layers(self) -> list[str]:
        return [name for name in self.pieces if name not in ENDS]


def chain_of(run: Run) -> Chain:
    """The pieces; where a loop keeps every layer's result until it is over, that is said once, and
    not for each of them."""
    found = with_handed(cut(run, frozenset()))
    results = {f"{place}:{number}" for place, number in found.results.values()}
    follow = set(carried(found).values()) - results
    unread = {
        title
        for piece in found.pieces.values()
        for title in piece.unread
        if title.rpartition(":")[0] not in ENDS
    }
    kept = unread & follow
    held = left_to_the_end(found, unread - kept - results)
    if not kept | held:
        return found
    again = with_handed(cut(run, frozenset(kept | held)))
    return replace(again, history=bool(kept), held=frozenset(held))


def with_handed(chain: Chain) -> Chain:
    """With the names of what each layer hands to the next one beside its `x` (LiLT's states of the
    layout), by where it lies there. The last layer makes it, too, though nobody reads it."""
    layers = chain.layers
    rivals = {name: sorted(own) for name, own in candidates(chain).items() if name in layers}
    if MIDDLE in chain.pieces or len(layers) < 3 or len(rivals.get(layers[1], ())) < 2:
        return chain
    follow = carried(chain)
    second = chain.pieces[layers[1]].given
    own = [title for title in rivals[layers[1]] if title != follow[layers[1]]]
    places = {second[title]: f"{HANDED}{number}" for number, title in enumerate(own)}
    numbers = {int(title.rpartition(":")[2]): places[second[title]] for title in own}
    found = {f"{layer}:{number}": name for layer in layers for number, name in numbers.items()}
    first = chain.pieces[layers[0]].given
    found |= {title: places[one] for title, one in first.items() if one in places}
    last = chain.pieces[layers[-1]]
    for number in numbers:
        if last.values[number].until == len(last.calls):
            last.values[number].until = None
    return replace(chain, handed=found)


def left_to_the_end(chain: Chain, unread: Collection[str]) -> set[str]:
    """Of what an end lets go and reads never, that which every layer makes, the last one's at the
    end of itself: an encoder's own cache of keys and values (XLM)."""
    numbers = {title.rpartition(":")[2] for title in unread}
    most = chain.layers[:-2]  # the loop's variables have those of the last two
    of_all = [one for one in numbers if all(f"{layer}:{one}" in unread for layer in most)]
    of_all = of_all if most else []
    return {f"{layer}:{number}" for layer in chain.layers for number in of_all}


def cut(run: Run, ignored: frozenset[str]) -> Chain:
    """The pieces, without what lets go of the ignored values."""
    builder = Builder(run, frozenset({MIDDLE, FINAL}))
    last = before = START
    late: set[str] = set()
    moments: dict[int, set[int]] = {}  # of what is late, the operations of the next layer
    leaders = leaders_of(run.log)
    for one, name in zip(run.log, segment_names(run.log, leaders, leaves_of(run)), strict=True):
        if isinstance(one, int):
            owner = builder.root.get(one)
            own = owner is not None and owner[0] == last  # its variables go when it has returned
            builder.now = last if own and not builder.piece(name).calls else name
            title = "" if owner is None else f"{owner[0]}:{owner[1]}"
            read = owner is not None and name in ENDS and (name, *owner) in builder.outside
            loops = owner is not None and owner[0] == before not in ENDS and not read
            if title in ignored or loops:
                builder.now = ""  # what a loop over layers lets go when it is over
                if owner is not None and title not in ignored and list_of(before) == list_of(last):
                    late.add(title)
                    done = len(builder.piece(last).calls)
                    moments.setdefault(owner[1], set()).add(-1 if name in ENDS else done)
            builder.freed(one)
        else:
            builder.call(one, name)
            before, last = (last, name) if name != last else (before, last)
    results: dict[str, tuple[str, int]] = {}
    for name, ref in run.results.items():
        place = builder.latest.get(key(ref)) or builder.root.get(ref.block)
        if place is not None and place != results.get("loss"):  # under another name, too (LUKE)
            results[name] = place
    pieces = builder.finished()
    return Chain(
        pieces=pieces,
        results=results,
        history=bool(ignored),
        late=unread_results(pieces, late),
        overwritten=early(moments, pieces),
        leaders=leaders,
    )


def early(moments: Mapping[int, set[int]], pieces: Mapping[str, Piece]) -> dict[int, int]:
    """Of what layers return and nobody reads, that which goes while the next one runs: a variable
    of the loop is overwritten in the midst of it. Behind the last one it goes with the others."""
    lengths = {len(piece.calls) for name, piece in pieces.items() if name not in ENDS}
    found = {number: some - {-1} for number, some in moments.items()}
    one = {number: min(some) for number, some in found.items() if len(some) == 1}
    return {number: at for number, at in one.items() if at < min(lengths)}


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


def leaders_of(log: Sequence[Call | int]) -> dict[str, str]:
    """Of lists that take turns entry by entry (attention, norm, feed-forward), the first one, whose
    entries are the layers."""
    found: dict[str, str] = {}
    for before, after in pairwise(filter(None, entries(log))):
        if beside(before, after):
            first = list_of(before)
            found.setdefault(list_of(after), found.get(first, first))
    return found


def entries(log: Sequence[Call | int]) -> list[str]:
    """The entry of a list that each call runs in. Lists of tables hold no layers (MarkupLM has
    a table for each step of a path)."""
    found = [layer_of(one.where) if isinstance(one, Call) else "" for one in log]
    others = {
        list_of(entry)
        for one, entry in zip(log, found, strict=True)
        if isinstance(one, Call) and one.name != "aten::embedding"
    }
    return [entry if list_of(entry) in others else "" for entry in found]


def led(layer: str, leaders: Mapping[str, str]) -> str:
    """The layer that an entry of a list belongs to."""
    own, _, number = layer.rpartition(".")
    return f"{leaders[own]}.{number}" if own in leaders else layer


def layer_names(log: Sequence[Call | int], leaders: Mapping[str, str]) -> list[str]:
    """The layer of each call; where one runs many times, its turn in place of its number."""
    own = entries(log)
    pairs = [*zip(log, own, strict=True)]
    again = {list_of(entry) for one, entry in pairs if isinstance(one, Call) and one.turn > 1}
    found, turns = [], dict[tuple[str, int], str]()
    for one, entry in pairs:
        layer = led(entry, leaders)
        if isinstance(one, Call) and entry and list_of(entry) in again:
            number = len(turns)
            layer = turns.setdefault((layer, one.turn), f"{list_of(layer)}{TURNS}.{number}")
        found.append(layer)
    return found


def closing_of(log: Sequence[Call | int], layers: Sequence[str]) -> int:
    """Where the last layer ends: what runs behind it, outside of its modules, may be what runs
    behind every other layer, too (XLM multiplies by a mask)."""
    ends = {layer: index for index, layer in enumerate(layers) if layer}
    *_, before, last = [*ends.values()] if len(ends) > 1 else (0, len(layers))
    behind = [one for one in log[before + 1 : last] if isinstance(one, Call)]
    own = next((n for n, one in enumerate(behind) if layer_of(one.where)), 0)
    calls = [(n, one) for n, one in enumerate(log) if n > last and isinstance(one, Call)][:own]
    alike = [(one.name, one.where) for one in behind[:own]] == [
        (one.name, one.where) for _, one in calls
    ]
    return calls[-1][0] + 1 if alike and calls else last + 1


def leaves_of(run: Run) -> frozenset[str]:
    """Modules with weights and without other modules: an entry of a list of convolutions is no
    layer."""
    owners = {one.name.rpartition(".")[0] for one in run.weights}
    inner = set()
    for one in owners:
        while one := one.rpartition(".")[0]:
            inner.add(one)
    return frozenset(owners - inner)


def segment_names(
    log: Sequence[Call | int], leaders: Mapping[str, str], leaves: frozenset[str] = frozenset()
) -> list[str]:
    """The piece that each entry belongs to. What runs between two layers of one list belongs to the
    first of them."""
    layers = layer_names(log, leaders)
    layers = ["" if one in leaves else one for one in layers]
    ahead = [""] * len(log)
    following = ""
    for index in range(len(log) - 1, -1, -1):
        ahead[index] = following
        following = layers[index] or following
    found: list[str] = []
    now, last = START, ""
    closing = closing_of(log, layers)
    for index, (layer, following) in enumerate(zip(layers, ahead, strict=True)):
        if layer:
            now = last = layer
        elif last and not following:
            now = last if index < closing else FINAL
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
    the piece before made for nobody else, what becomes the last layer's `x` in its turn."""
    found: dict[str, str] = {}
    after = ""
    for name, own in reversed(candidates(chain).items()):
        if len(own) > 1:
            own = alike_in(chain, name, own, after, found)
        if len(own) != 1:
            before = [*chain.pieces][[*chain.pieces].index(name) - 1]
            raise Refused(f"`{name}` takes {len(own)} values that `{before}` made for it alone")
        found[name], after = own[0], name
    return dict(reversed(found.items()))


def alike_in(
    chain: Chain, name: str, own: list[str], after: str, follow: Mapping[str, str]
) -> list[str]:
    """Of several values, that with the number of what the layer makes as `x` itself; of those that
    come before the layers, that which lies where the next layer has its `x`."""
    if after not in follow or MIDDLE in chain.pieces:
        return own
    number = follow[after].rpartition(":")[2]
    found = [one for one in own if one.rpartition(":")[0] not in ENDS]
    if found:
        return [one for one in found if one.rpartition(":")[2] == number]
    place = chain.pieces[after].given[follow[after]]
    return [one for one in own if chain.pieces[name].given[one] == place]


def candidates(chain: Chain) -> dict[str, list[str]]:
    """For each piece but the first, what the piece before made for it alone."""
    names = list(chain.pieces)
    readers: dict[str, list[str]] = {}
    for name, piece in chain.pieces.items():
        for title in piece.given:
            if title not in piece.unread:
                readers.setdefault(title, []).append(name)
    found: dict[str, list[str]] = {}
    for before, name in pairwise(names):
        own = [
            title
            for title in chain.pieces[name].given
            if title.rpartition(":")[0] == before and readers.get(title) == [name]
        ]
        if name == MIDDLE and not own:  # the decoder's layers read it, and nothing before them
            own = [title for title in readers if title.rpartition(":")[0] == before]
        found[name] = own
    return found


__all__ = ["ENDS", "MIDDLE", "Chain", "carried", "chain_of", "led", "list_of", "passed_on"]
