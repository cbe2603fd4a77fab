"""A stage of Megatron's pipeline: its micro-batches in the order of the schedule, what it receives
and sends, and what is in flight.

Megatron takes a new buffer for everything that it receives and gives a stage's result back as soon
as it is sent (megatron-core 0.16.1 pipeline_parallel/schedules.py, p2p_communication.py). torch's
is in `stages`.
"""

from __future__ import annotations

from typing import Any

from memfit.formats import FORMATS
from memfit.lower import ops
from memfit.lower.body import Body
from memfit.lower.context import context, leave_autocast
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.schedules import Turn, turns
from memfit.lower.tensors import Dim, Shape, Tensor
from memfit.program import Program, Stage


class Pipeline:
    repeats = True  # every step is like the first
    evaluates = False

    def __init__(self, r: Recorder, program: Program, body: Body) -> None:
        assert program.stage is not None
        assert program.strategy.pp is not None
        self.r, self.program, self.body = r, program, body
        self.stage: Stage = program.stage
        self.turns = turns(program.strategy.pp, self.stage.number, self.stage.micro_batches)
        self.passing: dict[
            tuple[int, int], tuple[Tensor | None, Tensor, Any]
        ] = {}  # received, result, what nodes hold
        self.given: Tensor | None = None  # the last gradient received, and
        self.sent: Tensor | None = None  # the last one sent: variables of the schedule

    def evaluate(self, step: int, batch: int, tokens: int) -> None:
        raise NotImplementedError

    def step(self, step: int, tokens: int) -> None:
        for turn in self.turns:
            (self.forward if turn.forward else self.backward)(turn, step, tokens)
        self.given = self.sent = None

    # ------------------------------------------------------------------ what passes between stages
    def shape(self, tokens: int) -> Shape:
        return (
            self.body.programs.passed(self.program, tokens)
            if self.body.programs.passed is not None
            else (
                Dim(self.program.job.batch, "B"),
                Dim(tokens, "S"),
                self.program.model.width,
            )
        )

    def receive(self, turn: Turn, tokens: int) -> Tensor:
        size = self.stage.count
        shape, format = self.shape(tokens), FORMATS[self.program.hidden]
        total = 1
        for one in shape:
            total *= one
        self.r.where = ""
        self.r.comm("recv", format.bytes(total), size, "pp")
        return self.r.tensor(shape, format, "recv", "communication")

    def send(self, x: Tensor) -> None:
        self.r.comm("send", x.format.bytes(x.count), self.stage.count, "pp")

    # --------------------------------------------------------------------------------------- turns
    def forward(self, turn: Turn, step: int, tokens: int) -> None:
        r, program, body = self.r, self.program, self.body
        chunk, shape = (
            self.stage.chunks[turn.chunk],
            (Dim(program.job.batch, "B"), Dim(tokens, "S")),
        )
        r.mark("forward", "", step)
        received = None if chunk.begins else self.receive(turn, tokens)
        if received is not None:
            received.needs = True
        ids = ops.integers(r, shape, "inputs") if chunk.begins else None
        labels = ops.integers(r, shape, "inputs") if chunk.ends else None
        ctx = context(
            r, program, body.programs, shape, keys=tokens, training=True, engine=body.engine
        )
        x = ids if received is None else received
        assert x is not None
        out = body.run_chunk(chunk, x, ctx, step)
        del x, ids
        if labels is not None:
            out = body.programs.losses[program.job.loss](out, labels, body.model, body.ends, ctx)
        leave_autocast(ctx)
        ctx.returned.clear()
        if labels is None:
            self.send(out)
            node, needs = out.node, out.needs
            out = Tensor(
                (1,), out.format, None, node, needs
            )  # pseudo-deallocated: its node is what counts
        kept, r.kept = r.kept, []
        self.passing[turn.chunk, turn.micro] = received, out, kept

    def backward(self, turn: Turn, step: int, tokens: int) -> None:
        r = self.r
        r.mark("backward", "", step)
        received, out, r.kept = self.passing.pop((turn.chunk, turn.micro))
        if self.stage.chunks[turn.chunk].ends:
            gradient = r.like(out, "ones_like")
        else:
            gradient = self.given = self.receive(turn, tokens)
        r.thread = "backward"
        r.backward(out, gradient)
        r.thread = "forward"
        del out, gradient
        r.let_go(r.kept)
        r.mark("backward", "", step)
        if received is not None:
            assert received.grad is not None
            self.send(received.grad)
            self.sent = received.grad


def overlay(programs: Programs, program: Program) -> Programs:
    return programs.replace(stages=Pipeline) if program.engine else programs
