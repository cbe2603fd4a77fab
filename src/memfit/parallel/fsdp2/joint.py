"""FSDP2 of torchtitan's layers whose experts are spread: one unit of two groups, weights that all
ranks share and experts that some hold, gathered side by side where the layer begins, and the next
layer's with them, for which it asks by hand (torchtitan 0.3.0 distributed/fsdp.py
apply_fsdp_to_decoder; torch 2.13 _fully_shard/_fsdp_state.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.lower.engine import EMBED, TAIL, gate
from memfit.lower.tensors import Tensor
from memfit.parallel.fsdp2.engine import FORWARD, FSDP2, PRE_BACKWARD, Group

if TYPE_CHECKING:
    from memfit.lower.body import Body


class Joint(FSDP2):
    def load(self, body: Body) -> None:
        super().load(body)
        self.mates = {group.span: group for group in self.groups.values() if group.inside}
        for group in self.mates.values():
            group.reshard = self.layout.reshard
        ends = (self.groups.get(EMBED), *self.layers, self.groups.get(TAIL))
        self.row = [
            group for group in ends if group is not None
        ]  # each asks for the next in the forward, for the one before in the backward

    def members(self, group: Group | None) -> list[Group]:
        """The groups of one unit."""
        if group is None:
            return []
        mate = self.mates.get(group.span) if group in self.layers else None
        return [group] if mate is None else [group, mate]

    def beside(self, group: Group, step: int) -> Group | None:
        at = self.row.index(group) + step if group in self.row else -1
        return self.row[at] if 0 <= at < len(self.row) else None

    # ------------------------------------------------------------------------------------- forward
    def before(self, name: str, x: Tensor) -> Tensor:
        group = self.opens.get(name)
        again = group is not None and group.state == PRE_BACKWARD
        x = super().before(name, x)
        for mate in self.members(group)[1:]:
            if again and not mate.unsharded:
                self.unshard(mate)
                self.copy_out(mate)
            elif not again:
                x = self.reducing(mate, x)
        return x

    def reducing(self, group: Group, x: Tensor) -> Tensor:
        return gate(self.r, x, lambda: self.post_backward(group))

    def ahead(self, group: Group) -> None:
        for mate in self.members(group)[1:]:
            mate.state = FORWARD
            self.unshard(mate)
            self.copy_out(mate)
        if group.name != TAIL:
            for other in self.members(self.beside(group, 1)):
                self.unshard(other)

    def complete(self, group: Group, out: Tensor) -> Tensor:
        """One hook stands for all groups of the unit."""
        for mate in self.members(group)[1:]:
            super().complete(mate, out)
        return super().complete(group, out)

    # ------------------------------------------------------------------------------------ backward
    def pre_backward(self, group: Group) -> None:
        if group.state == PRE_BACKWARD:
            return
        known = bool(group.places)
        for one in self.members(group):
            one.state = PRE_BACKWARD
            self.unshard(one)
            self.copy_out(one)
            if one.places:
                one.places.pop()
        if known and group.name != EMBED:
            for other in reversed(self.members(self.beside(group, -1))):
                self.unshard(other)


ENGINE = Joint
