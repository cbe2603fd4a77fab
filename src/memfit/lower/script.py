"""The passes of a micro-batch, walked once with one layer for many and a word wherever the engine is told something; then played as often as they
happen, every layer written out, with the engine acting at each word. What engines do differs from layer to layer and from rank to rank, what the
model does does not."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeAlias, cast

from memfit.lower.body import Body
from memfit.lower.compact import repeats
from memfit.lower.expand import expanded
from memfit.lower.layouts.base import parameters
from memfit.lower.layouts.hooks import Hooked, Teller
from memfit.lower.recorder import Recorder, Standing
from memfit.lower.tensors import Storage, Tensor
from memfit.lower.told import Line, Place, Told
from memfit.program import Program
from memfit.tape import Alloc, Event, Free, Mark

MicroBatch: TypeAlias = "Callable[[Recorder, Program, Body, int, int], None]"  # in a step, of so many tokens
Keep: TypeAlias = "Callable[[Hashable, Callable[[], Script]], Script]"  # what is found under this name, or made


class Script:
    """`events` with blocks numbered from 0; `taken` are gradients that the engine is handed, `stays` what nobody gives back, a workspace.
    `standing`: what there is of that when it was walked. Without events where the walk does not tell how layers hang together."""

    def __init__(self, events: Sequence[Line], batch: int, standing: Standing) -> None:
        self.events, self.standing = events[1 + batch :], standing  # it begins with its mark and the batch, which the loop holds
        self.count = sum(type(event) is Alloc for event in events)
        self.taken = {event.block for event in events if type(event) is Told and event.block >= 0}
        self.stays = {event.id for event in self.events if type(event) is Alloc} - {
            event.id for event in self.events if type(event) is Free
        }


class Player:
    """Plays micro-batches for the engine of a loaded body; `walk` is how one is walked, `keep` knows what other ranks found."""

    def __init__(self, body: Body, engine: Hooked, folded: Program, walk: MicroBatch, keep: Keep) -> None:
        self.r, self.engine, self.folded, self.walk, self.keep = body.r, engine, folded, walk, keep
        self.leaves = {bound.prefix: [leaf for _, leaf in parameters(bound)] for bound in (body.ends, *body.layers)}
        self.trained = [leaf for _, leaves in body.trained() for leaf in leaves]
        self.found: dict[tuple[Place, ...], tuple[Tensor | None, ...]] = {}
        self.scripts: dict[tuple[int, bool], Script] = {}  # by tokens, and whether there are gradients to add to
        self.played: set[Script] = set()

    def play(self, step: int, tokens: int) -> bool:
        """Whether there is a script: not where the walk does not tell how layers hang together."""
        key = tokens, any(leaf.grad is not None for leaf in self.trained)
        if key not in self.scripts:
            self.scripts[key] = self.keep((*key, self.r.standing_now.name), partial(self.written, *key))
            if self.scripts[key].events:
                self.r.stand(self.scripts[key].standing)
        script = self.scripts[key]
        if script.events:
            self.run(script, step)
        return bool(script.events)

    def written(self, tokens: int, added: bool) -> Script:
        r, folded = self.r.beside(), self.folded
        teller = Teller(r, folded, self.engine, added)
        body = Body(r, folded, teller)
        teller.load(body)
        self.walk(r, folded, body, 0, tokens)
        found = repeats(r, folded)
        events = expanded(tuple(r.events), found or (), folded.entries, folded.model.prefix)
        return Script(events or (), len(body.batch), r.standing_now)

    def leaf(self, place: Place) -> Tensor | None:
        return None if place is None else self.leaves[place[0]][place[1]]

    def run(self, script: Script, step: int) -> None:
        """Blocks get numbers of this run. One that the engine is handed lives until neither needs it."""
        r, base, held = self.r, self.r.reserve(script.count), dict[int, Storage]()
        write, new, taken, stays = r.write, tuple.__new__, script.taken, script.stays
        skipped = stays if script in self.played else frozenset[int]()
        behind = [*script.events[1:], None]
        for event, following in zip(script.events, behind, strict=True):
            if type(event) is Alloc:
                id, size, part, where, op, formula, stream = event
                if id in taken:
                    held[id] = Storage(id + base, size, write)
                elif id in skipped:
                    continue
                write(new(Alloc, (id + base, size, part, where, op, formula, stream)))
            elif type(event) is Free:
                id = event[0]
                if id in taken:
                    held.pop(id, None)
                else:
                    write(new(Free, (id + base, event[1])))
            elif type(event) is Mark:
                r.mark(event.phase, event.where, step)
            elif type(event) is Told:
                self.act(event, held, type(following) is Free and following[0] == event.block >= 0)
            else:
                write(cast(Event, event))
        self.played.add(script)

    def act(self, told: Told, held: dict[int, Storage], alone: bool) -> None:
        """`alone`: nothing but the leaf holds its gradient from here on."""
        engine = self.engine
        self.r.where = told.where
        if told.act == "finish":
            engine.finish()
        elif told.act == "ready":
            leaf = self.leaf(told.leaves[0])
            assert leaf is not None
            if told.block >= 0:
                leaf.grad = Tensor(leaf.shape, leaf.format, held.pop(told.block) if alone else held[told.block])
            engine.ready(leaf)
        else:
            if told.leaves not in self.found:
                self.found[told.leaves] = tuple(map(self.leaf, told.leaves))
            engine.told(told.act, told.name, self.found[told.leaves])


__all__ = ["Keep", "Player", "Script"]
