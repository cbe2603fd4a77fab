"""Where DeepSpeed's hooks sit in the model's graph, and an engine that only writes down what they
would tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from memfit.lower.engine import EMBED, Engine, Leaves, gate, parameters, silently
from memfit.lower.layout_notice import Notice, Place
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.program import Program
from memfit.tape import Event

if TYPE_CHECKING:
    from memfit.lower.body import Body

PAST = " back"  # behind the name of a hook: the same in backward
# in the recomputation of a checkpoint whose tensors are saved then (use_reentrant=False)
AGAIN = " again"


class Hooked(Engine):
    """Everything that happens at a hook happens in `told`, so that the graph is one thing and the
    engine another."""

    gates = False  # there are hooks at modules
    products: frozenset[int] = frozenset()  # weights of products whose input is saved in any case

    def cast(self, body: Body) -> None:
        """The parameters get the numbers that the engine trains them in."""

    def saves(self, body: Body) -> frozenset[int]:
        """Weights of products whose input is saved in any case."""
        return frozenset()

    def notify(self, act: str, name: str = "", leaves: Leaves = ()) -> None:
        """A module runs (`before`, `after`: units by name; `enter`, `leave`: modules by
        parameters), or its backward does."""

    def before(self, name: str, x: Tensor) -> Tensor:
        if not self.gates:
            return x
        self.notify("before", name)
        return gate(self.r, x, lambda: self.notify(f"before{PAST}", name))

    def after(self, name: str, out: Tensor) -> Tensor:
        if not self.gates or name == EMBED:
            return out
        self.notify("after", name)
        return gate(self.r, out, lambda: self.notify(f"after{PAST}", name))

    def enter(self, leaves: Leaves, x: Tensor) -> Tensor:
        if not self.gates:
            return x
        self.notify("enter", leaves=leaves)
        frozen = any(
            leaf is not None and not leaf.needs and id(leaf) in self.products for leaf in leaves
        )
        return gate(self.r, x, lambda: self.notify(f"enter{PAST}", leaves=leaves), keeps=frozen)

    def leave(self, leaves: Leaves, out: Tensor) -> Tensor:
        if not self.gates:
            return out
        where, frame = self.r.where, self.r.frame
        self.notify(
            "leave" if frame is None or not frame.replaying else f"leave{AGAIN}", leaves=leaves
        )

        def back() -> None:
            self.r.where = where
            self.notify(f"leave{PAST}", leaves=leaves)

        return gate(self.r, out, back)


class Notifier(Hooked):
    """Stands in for such an engine: the same hooks, each of which leaves a word. Gradients go as
    they come, but for what else holds them; with `added`, parameters have gradients already, to
    which they are added."""

    def __init__(self, r: Recorder, program: Program, engine: Hooked, added: bool) -> None:
        super().__init__(r, program)
        self.engine, self.gates, self.inner, self.added = engine, engine.gates, engine.inner, added
        self.places: dict[int, Place] = {}

    def load(self, body: Body) -> None:
        with silently(self.r):
            body.load()
            body.adapt()
            self.engine.cast(body)
        for bound in (body.ends, *body.layers):
            self.places.update(
                (id(leaf), (bound.prefix, place))
                for place, (_, leaf) in enumerate(parameters(bound))
            )
        for leaf in (leaf for _, leaves in body.trained() for leaf in leaves if self.added):
            leaf.grad = Tensor(leaf.shape, leaf.format, None)
        self.products = self.engine.saves(body)

    def notify(self, act: str, name: str = "", leaves: Leaves = ()) -> None:
        self.write(
            Notice(
                act,
                self.r.where,
                name,
                tuple(None if leaf is None else self.places[id(leaf)] for leaf in leaves),
            )
        )

    def write(self, told: Notice) -> None:
        self.r.write(cast(Event, told))

    def ready(self, leaf: Tensor) -> None:
        block = -1 if leaf.grad is None or leaf.grad.storage is None else leaf.grad.storage.id
        self.write(Notice("ready", self.r.where, "", (self.places[id(leaf)],), block))
        if not self.added:
            leaf.grad = None

    def finish(self) -> None:
        self.write(Notice("finish", self.r.where))


__all__ = ["PAST", "Hooked", "Notifier"]
