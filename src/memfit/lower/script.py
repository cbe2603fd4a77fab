"""The passes of a micro-batch, walked once with one layer for many and a word wherever the engine
is told something; then played as often as they happen, every layer written out, with the engine
acting at each word. What engines do differs from layer to layer and from rank to rank, what the
model does does not."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, cast

from memfit.lower.body import Body
from memfit.lower.compact import repeats
from memfit.lower.engine import parameters
from memfit.lower.engine_hooks import Hooked, Notifier
from memfit.lower.expand import expanded
from memfit.lower.layout_notice import Line, Notice, Place
from memfit.lower.recorder import Recorder, Standing
from memfit.lower.tensors import Storage, Tensor
from memfit.program import Program
from memfit.tape import Alloc, Event, Free, Mark

MicroBatch: TypeAlias = (
    "Callable[[Recorder, Program, Body, int, int], None]"  # in a step, of so many tokens
)
Keep: TypeAlias = (
    "Callable[[Hashable, Callable[[], Script]], Script]"  # what is found under this name, or made
)


class Piece(NamedTuple):
    """What is the same each time, and what comes behind it: a mark, a word for the engine, a block
    that may outlive the passes. `alone`: the block that the engine is told of is the leaf's alone
    from here on."""

    plain: tuple[Event, ...]
    last: Line | None
    alone: bool


class Script:
    """`events` with blocks numbered from 0; `taken` are gradients that the engine is handed,
    `stays` what nobody gives back, a workspace. `standing`: what there is of that when it was
    walked. Without events where the walk does not tell how layers hang together."""

    def __init__(self, events: Sequence[Line], batch: int, standing: Standing) -> None:
        self.events, self.standing = (
            events[1 + batch :],
            standing,
        )  # it begins with its mark and the batch, which the loop holds
        self.count = sum(type(event) is Alloc for event in events)
        self.taken = {event.block for event in events if type(event) is Notice and event.block >= 0}
        freed = {event.id for event in self.events if type(event) is Free}
        self.stays = {event.id for event in self.events if type(event) is Alloc} - freed
        self.numbered: dict[int, list[Piece]] = {}

    def pieces(self, base: int) -> list[Piece]:
        """With blocks numbered from `base`: all but those that may outlive the passes go, so that
        their numbers come again."""
        if base not in self.numbered:
            self.numbered[base] = list(self.cut(base))
        return self.numbered[base]

    def cut(self, base: int) -> Iterator[Piece]:
        own, new, plain = self.taken | self.stays, tuple.__new__, list[Event]()
        for event, following in zip(self.events, [*self.events[1:], None], strict=True):
            if type(event) is Alloc and event[0] not in own:
                id, *rest = event
                plain.append(new(Alloc, (id + base, *rest)))
            elif type(event) is Free and event[0] not in own:
                plain.append(new(Free, (event[0] + base, event[1])))
            elif type(event) in (Alloc, Free, Mark, Notice):
                alone = (
                    type(event) is Notice
                    and type(following) is Free
                    and following[0] == event.block >= 0
                )
                yield Piece(tuple(plain), event, alone)
                plain = []
            else:
                plain.append(cast(Event, event))
        yield Piece(tuple(plain), None, False)


class Player:
    """Plays micro-batches for the engine of a loaded body; `walk` is how one is walked, `keep`
    knows what other ranks found."""

    def __init__(
        self, body: Body, engine: Hooked, folded: Program, walk: MicroBatch, keep: Keep
    ) -> None:
        self.r, self.engine, self.folded, self.walk, self.keep = body.r, engine, folded, walk, keep
        self.leaves = {
            bound.prefix: [leaf for _, leaf in parameters(bound)]
            for bound in (body.ends, *body.layers)
        }
        self.trained = [leaf for _, leaves in body.trained() for leaf in leaves]
        self.found: dict[tuple[Place, ...], tuple[Tensor | None, ...]] = {}
        self.scripts: dict[
            tuple[int, bool], Script
        ] = {}  # by tokens, and whether there are gradients to add to
        self.bases: dict[Script, int] = {}  # of those that were played: their first block's number

    def play(self, step: int, tokens: int) -> bool:
        """Whether there is a script: not where the walk does not tell how layers hang together."""
        key = tokens, any(leaf.grad is not None for leaf in self.trained)
        if key not in self.scripts:
            self.scripts[key] = self.keep(
                (*key, self.r.standing_now.name), partial(self.written, *key)
            )
            if self.scripts[key].events:
                self.r.stand(self.scripts[key].standing)
        script = self.scripts[key]
        if script.events:
            self.run(script, step)
        return bool(script.events)

    def written(self, tokens: int, added: bool) -> Script:
        r, folded = self.r.beside(), self.folded
        teller = Notifier(r, folded, self.engine, added)
        body = Body(r, folded, teller)
        teller.load(body)
        self.walk(r, folded, body, 0, tokens)
        found = repeats(r, folded)
        events = expanded(tuple(r.events), found or (), folded.entries, folded.model.path)
        return Script(events or (), len(body.batch), r.standing_now)

    def leaf(self, place: Place) -> Tensor | None:
        return None if place is None else self.leaves[place[0]][place[1]]

    def run(self, script: Script, step: int) -> None:
        """A block that the engine is handed lives until neither needs it."""
        r, held, again = self.r, dict[int, Storage](), script in self.bases
        base = self.bases.setdefault(script, self.r.next_id)
        if not again:
            r.reserve(script.count)
        for plain, event, alone in script.pieces(base):
            r.events += plain
            if type(event) is Alloc:
                id, size, *rest = event
                if id not in script.taken and again:
                    continue
                number = r.number()
                r.write(tuple.__new__(Alloc, (number, size, *rest)))
                if id in script.taken:
                    held[id] = Storage(number, size, r.write)
            elif type(event) is Free:
                held.pop(event[0], None)
            elif type(event) is Mark:
                r.mark(event.phase, event.where, step)
            elif type(event) is Notice:
                self.act(event, held, alone)

    def act(self, told: Notice, held: dict[int, Storage], alone: bool) -> None:
        """`alone`: nothing but the leaf holds its gradient from here on."""
        engine = self.engine
        self.r.where = told.where
        if told.act == "finish":
            engine.finish()
        elif told.act == "ready":
            leaf = self.leaf(told.leaves[0])
            assert leaf is not None
            if told.block >= 0:
                leaf.grad = Tensor(
                    leaf.shape, leaf.format, held.pop(told.block) if alone else held[told.block]
                )
            engine.ready(leaf)
        else:
            if told.leaves not in self.found:
                self.found[told.leaves] = tuple(map(self.leaf, told.leaves))
            engine.notify(told.act, told.name, self.found[told.leaves])


__all__ = ["Keep", "Player", "Script"]
