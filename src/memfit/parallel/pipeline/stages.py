"""A stage of a pipeline as torch runs it: a buffer for every micro-batch from the first step on,
results kept until their backward, what was sent kept as long as the schedule's own variables hold
it.

Read from torch 2.13 distributed/pipelining/stage.py (`_setup_forward_recv_info`,
`_create_grad_recv_info`, `forward_one_chunk`, `backward_one_chunk`) and schedules.py
(`_step_microbatches` of each); a work of NCCL holds what it sent until nobody holds the work
(ProcessGroupNCCL.cpp `pointToPoint`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from memfit.formats import FORMATS
from memfit.lower import head, ops
from memfit.lower.body import Body
from memfit.lower.context import context, leave_autocast
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.schedules import Turn, turns
from memfit.lower.tensors import Dim, Tensor
from memfit.parallel.pipeline import deferred_weights as deferred
from memfit.program import Program, Stage

SINGLE = (
    "1f1b",
    "gpipe",
)  # one stage on a rank: the result of the last forward stays in a variable of the schedule


class Passing(NamedTuple):
    """A micro-batch between its forward and its backward: what came in, what went out or the loss,
    what nodes hold, the stage's result."""

    received: Tensor | None
    out: Tensor
    kept: list[tuple[str, Any]]
    result: Tensor


class Stages:
    """`works`: what was sent, as long as the list of works does; `leftover`: gradients of what was
    received, until the next step."""

    repeats = False  # buffers that a step replaces are not those of the step before
    evaluates = True

    def __init__(self, r: Recorder, program: Program, body: Body) -> None:
        assert program.stage is not None
        assert program.strategy.pp is not None
        self.r, self.program, self.body = r, program, body
        self.stage: Stage = program.stage
        self.schedule = program.strategy.pp.schedule
        self.warm = min(
            self.stage.micro_batches, self.stage.count - self.stage.number
        )  # forwards of `1f1b` before its first backward
        self.turns = turns(
            program.strategy.pp, self.stage.number, self.stage.micro_batches, whole=True
        )
        self.passing: dict[tuple[int, int], Passing] = {}
        self.split: dict[
            tuple[int, int], tuple[Any, ...]
        ] = {}  # between the gradients of what came in and those of the weights
        self.staying: dict[tuple[bool, int, int], Tensor] = {}
        self.works: list[Tensor] = []
        self.leftover: list[Tensor] = []
        self.last: dict[str, Tensor] = {}  # variables of the schedule

    def step(self, step: int, tokens: int) -> None:
        """The whole batch is on every rank."""
        shape = (Dim(self.program.job.batch * self.stage.micro_batches, "B"), Dim(tokens, "S"))
        self.r.mark("forward", "", step)
        self.body.batch = tuple(ops.integers(self.r, shape, "inputs") for _ in range(2))
        self.leftover.clear()
        self.stay(tokens)
        does = {
            "forward": self.forward,
            "whole": self.backward,
            "input": self.backward_input,
            "weight": self.backward_weight,
        }
        last = {turn.chunk: place for place, turn in enumerate(self.turns)}  # always a backward
        for place, turn in enumerate(self.turns):
            if self.schedule not in SINGLE:
                self.body.engine.ahead_of(self.turns[place:])
            self.body.engine.enters(turn.chunk)
            self.body.engine.begin(last[turn.chunk] == place)
            does["forward" if turn.forward else turn.part](turn, step, tokens)
            if not turn.forward:
                self.body.engine.paused()
            if last[turn.chunk] == place and self.schedule not in SINGLE:
                self.body.engine.reduced()
        self.works.clear()
        if self.schedule in SINGLE:
            self.body.engine.reduced()
        self.last.clear()

    def evaluate(self, step: int, batch: int, tokens: int) -> None:
        """The same schedule without its backwards, in micro-batches of `batch` sequences (`eval`):
        what each receives and gives stays, logits among it, for only a backward takes it out of the
        stage's cache; and turning from training, buffers are made anew."""
        r, self.body.batch = self.r, ()
        r.mark("evaluate", "", step)
        r.grad = False
        self.body.batch = tuple(
            ops.integers(
                r, (Dim(batch * self.stage.micro_batches, "B"), Dim(tokens, "S")), "inputs"
            )
            for _ in range(2)
        )
        self.leftover.clear()
        self.buffers(True, (Dim(batch, "B"), Dim(tokens, "S"), self.program.model.width))
        for place, turn in enumerate(self.turns):
            if turn.forward:
                if self.schedule not in SINGLE:
                    self.body.engine.ahead_of(self.turns[place:])
                self.body.engine.enters(turn.chunk)
                self.forward(turn, step, tokens, batch)
        r.grad = True

    def stay(self, tokens: int) -> None:
        if not self.staying:
            for forward in (True, False):
                self.buffers(
                    forward,
                    (Dim(self.program.job.batch, "B"), Dim(tokens, "S"), self.program.model.width),
                )

    def buffers(self, forward: bool, shape: tuple[int, ...]) -> None:
        self.r.where = ""
        for number, chunk in enumerate(self.stage.chunks):
            for micro in range(
                self.stage.micro_batches if not (chunk.begins if forward else chunk.ends) else 0
            ):
                self.staying[forward, number, micro] = self.r.tensor(
                    shape, FORMATS[self.program.hidden], "recv", "communication"
                )

    def beside(self, number: int, step: int) -> int | None:
        """The rank's own chunk that stands right behind (or before) this one: tensors go from one
        to the other by hand."""
        if self.schedule != "zbv" and self.stage.count > 1:
            return None
        other = number + step
        turns_back = self.schedule != "zbv" or self.stage.number == self.stage.count - 1
        return other if 0 <= other < len(self.stage.chunks) and turns_back else None

    def pass_on(self, x: Tensor, forward: bool, turn: Turn) -> None:
        """To the neighbour, whose rank is another, or this one."""
        other = self.beside(turn.chunk, 1 if forward else -1)
        if other is not None:
            self.staying[forward, other, turn.micro] = x.detach()
            return
        self.r.comm("send", x.format.bytes(x.count), self.stage.count, "pp")
        if (
            self.schedule == "1f1b"
        ):  # operations that are fused with the next ones, waited for and dropped
            self.last["sent forward" if forward else "sent backward"] = x.detach()
            if forward and turn.micro < self.warm - 1:
                self.last["works"] = (
                    x.detach()
                )  # until the gradients of the last forward's stand there
        else:
            self.works.append(x.detach())

    def came(self, forward: bool, turn: Turn) -> Tensor:
        buffer = self.staying[forward, turn.chunk, turn.micro]
        if self.beside(turn.chunk, -1 if forward else 1) is None:
            self.r.where = ""
            self.r.comm("recv", buffer.format.bytes(buffer.count), self.stage.count, "pp")
        return buffer.detach()

    # --------------------------------------------------------------------------------------- turns
    def forward(self, turn: Turn, step: int, tokens: int, batch: int = 0) -> None:
        """`batch`: of an evaluation."""
        r, program, body = self.r, self.program, self.body
        chunk, shape = (
            self.stage.chunks[turn.chunk],
            (Dim(batch or program.job.batch, "B"), Dim(tokens, "S")),
        )
        r.mark("evaluate" if batch else "forward", "", step)
        received = None if chunk.begins else self.came(True, turn)
        if received is not None:
            received.needs = not batch
        ctx = context(
            r, program, body.programs, shape, keys=tokens, training=not batch, engine=body.engine
        )
        x = body.engine.stage_before(body.batch[0].view(*shape) if received is None else received)
        out = body.run_chunk(chunk, x, ctx, step)
        del x
        if chunk.ends:
            out = head.logits(out, body.model, body.ends, ctx)
        leave_autocast(ctx)
        out = body.engine.stage_after(out)
        result = out.detach()
        if self.schedule in SINGLE:
            self.last["output"] = result
        if not chunk.ends:
            self.pass_on(out, True, turn)
        else:
            out = head.loss(out, body.batch[1].view(*shape), body.model, ctx)
            self.works.append(out.detach())  # the schedule's list of losses
        kept, r.kept = r.kept, []
        self.passing[turn.chunk, turn.micro] = Passing(received, out, kept, result)

    def gradient(self, turn: Turn, out: Tensor) -> Tensor:
        return (
            self.r.like(out, "ones_like")
            if self.stage.chunks[turn.chunk].ends
            else self.came(False, turn)
        )

    def backward(self, turn: Turn, step: int, tokens: int) -> None:
        r = self.r
        r.mark("backward", "", step)
        received, out, r.kept, result = self.passing.pop((turn.chunk, turn.micro))
        gradient = self.gradient(turn, out)
        r.thread = "backward"
        r.backward(out, gradient)
        r.thread = "forward"
        del out, gradient, result
        r.let_go(r.kept)
        r.mark("backward", "", step)
        if received is not None:
            assert received.grad is not None
            self.pass_on(received.grad, False, turn)
        if turn.micro >= self.stage.micro_batches - self.warm:
            self.last.pop("works", None)

    def backward_input(self, turn: Turn, step: int, tokens: int) -> None:
        """Gradients of what came in alone; the first stage has nothing to do yet
        (`stage_backward_input`)."""
        r, key = self.r, (turn.chunk, turn.micro)
        r.mark("backward", "", step)
        received, out, kept, _ = self.passing.pop(key)
        gradient = self.gradient(turn, out)
        if received is None:
            self.split[key] = received, out, gradient, kept
            return
        r.thread = "backward"
        waiting = deferred.inputs(r, out, gradient, received)
        r.thread = "forward"
        assert received.grad is not None
        r.mark("backward", "", step)
        self.leftover.append(received.grad.detach())
        out = out.detach()  # with it goes what of the graph lies behind the last of those nodes
        self.split[key] = waiting, out, gradient, kept
        self.pass_on(received.grad, False, turn)

    def backward_weight(self, turn: Turn, step: int, tokens: int) -> None:
        """Gradients of the weights, one after the other in the model's order; of the first stage
        all (`stage_backward_weight`)."""
        r = self.r
        r.mark("backward", "", step)
        waiting, out, gradient, r.kept = self.split.pop((turn.chunk, turn.micro))
        r.thread = "backward"
        if waiting is None:
            r.backward(out, gradient)
        else:
            deferred.weights(
                r,
                waiting,
                [leaf for _, leaves in self.body.trained() for leaf in deferred.in_order(leaves)],
            )
        r.thread = "forward"
        del waiting, out, gradient
        r.let_go(r.kept)
        r.mark("backward", "", step)


def overlay(programs: Programs, program: Program) -> Programs:
    return programs if program.engine else programs.replace(stages=Stages)


__all__ = ["Stages", "overlay"]
