"""FSDP2 around the stages of a pipeline: every stage is a root of its own, gathered weights stay
after a backward, whole gradients add up until the stage's last backward, and only then are reduced,
group by group. A root has streams of its own.

Read from torch 2.13 distributed/pipelining/stage.py (`backward_maybe_with_nosync`,
`perform_reduce_grad`) and schedules.py (`_add_unshard_reshard`: schedules of several stages gather
whole ones ahead).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.lower.engine import ROOT, Unit, stage_units
from memfit.lower.recorder import Recorder
from memfit.lower.schedules import Turn
from memfit.lower.shards import COMPUTE, GATHER, REDUCE, REPLICAS
from memfit.lower.tensors import Storage, Tensor
from memfit.parallel.fsdp2.engine import FSDP2, IDLE, POST_BACKWARD, Group
from memfit.program import Program

if TYPE_CHECKING:
    from memfit.lower.body import Body

AHEAD = 3  # stages that are gathered at a time (`_add_unshard_reshard`, max_active_stages)


class Staged(FSDP2):
    def __init__(self, r: Recorder, program: Program) -> None:
        super().__init__(r, program)
        assert program.stage is not None
        self.stage = program.stage
        self.chunk_of: dict[str, int] = {}  # by the name of a unit
        self.now = 0
        self.sides: list[tuple[list[Group], list[Storage | None], list[Storage | None]]] = [
            ([], [], []) for _ in self.stage.chunks
        ]
        self.over = False
        self.active: list[int] = []  # stages that were gathered ahead

    def load(self, body: Body) -> None:
        self.chunk_of = {
            name: number
            for number, names in enumerate(stage_units(body, self.stage))
            for name in names
        }
        super().load(body)

    def group_of(self, unit: Unit, wrap: str, tied: bool) -> Group:
        """What a root keeps is its stage's own."""
        group = super().group_of(unit, wrap, tied)
        if group.name != ROOT:
            return group
        name = f"{ROOT} {self.chunk_of.get(unit.name, 0)}"
        del self.groups[ROOT]
        return self.groups.setdefault(
            name, Group(name=name, span=unit.span, reshard=False, ranks=self.ranks)
        )

    def own(self) -> list[Group]:
        """The groups of the stage that runs, as its modules stand: the root is the first."""
        root = self.groups.get(f"{ROOT} {self.now}")
        return [
            *([] if root is None else [root]),
            *(group for name, group in self.groups.items() if self.chunk_of.get(name) == self.now),
        ]

    # ------------------------------------------------------------------------------------- a stage
    def enters(self, chunk: int) -> None:
        self.sides[self.now] = self.order, self.before_last, self.inputs
        self.now = chunk
        self.order, self.before_last, self.inputs = self.sides[chunk]
        self.gathers, self.reduces, self.replicates = (
            stream + REPLICAS * chunk for stream in (GATHER, REDUCE, REPLICAS)
        )
        for group in self.own():
            if chunk in self.active and group.result:
                self.r.mark(self.r.phase, group.span, self.r.at)
                self.copy_out(group)

    def stage_before(self, x: Tensor) -> Tensor:
        return self.before(f"{ROOT} {self.now}", x)

    def stage_after(self, out: Tensor) -> Tensor:
        out = self.after(f"{ROOT} {self.now}", out)
        self.before_last.clear()
        return out

    def post_backward(self, group: Group) -> None:
        if self.over:
            super().post_backward(group)
            return
        group.state = POST_BACKWARD
        for param in group.params:
            if id(param) in group.added:
                param.leaf.grad = None  # added in place to what waits
        self.widen(group, [param for param in group.params if param.leaf.needs])

    def paused(self) -> None:
        """The root's final callback after a backward that is not the last."""
        for group in self.own():
            if group.state != POST_BACKWARD:
                self.at(group)
                self.post_backward(group)
            group.state = IDLE
        self.r.mark("backward", "", self.r.at)

    def reduced(self) -> None:
        """After the stage's last backward."""
        self.over = True
        for group in self.own():
            self.at(group)
            self.post_backward(group)
        for group in self.own():
            self.at(group)
            group.state, group.summed, group.result = IDLE, None, []
            group.places.clear()
        self.over = False
        self.order.clear()
        self.r.mark("backward", "", self.r.at)
        self.inputs.clear()

    def finish(self) -> None:
        """Nothing is left to do when the schedule is through, but to give up what was gathered
        ahead."""
        self.reshards(self.active[:])

    # ---------------------------------------------------------------- whole stages, gathered ahead
    def ahead_of(self, turns: tuple[Turn, ...]) -> None:
        """Before the first of these turns: the stages that come next are gathered, others
        given up."""
        wanted: list[int] = []
        for turn in turns:
            if turn.chunk not in wanted:
                wanted.append(turn.chunk)
                if len(wanted) == AHEAD:
                    break
        self.reshards([chunk for chunk in self.active if chunk not in wanted])
        for chunk in [one for one in wanted if one not in self.active]:
            self.active.append(chunk)
            self.everywhere(chunk, gather=True)

    def reshards(self, chunks: list[int]) -> None:
        for chunk in chunks:
            self.active.remove(chunk)
            self.everywhere(chunk, gather=False)

    def everywhere(self, chunk: int, *, gather: bool) -> None:
        now, gathers, phase = self.now, self.gathers, self.r.phase
        self.now, self.gathers = chunk, COMPUTE
        for group in self.own():
            self.r.mark(phase, group.span, self.r.at)
            if gather:
                self.unshard(group)
            else:
                self.reshard(group, forward=False)
        self.now, self.gathers = now, gathers
        self.r.mark(phase, "", self.r.at)


ENGINE = Staged
