"""What one of the GPUs holds over which one process split a model: it works between what the GPU
before hands it and what it hands on.

Hooks move a module's inputs to its GPU (accelerate 1.15 hooks.py AlignDevicesHook.pre_forward;
layouts/split.py); what the model returns is moved to the first GPU, where its inputs are
(`io_same_device`). Before transformers 5.23 they ran inside a layer's checkpoint, which so kept
what lay on the GPU before.
"""

from __future__ import annotations

from memfit.formats import FORMATS, FP32
from memfit.lower import ops
from memfit.lower.body import Body
from memfit.lower.context import context, leave_autocast
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Dim, Shape, Tensor
from memfit.program import Program

MICRO_BATCHES = 2  # of an accumulation: the second finds gradients there, as all later ones do


class Dealt:
    repeats = True  # every step is like the first
    evaluates = False

    def __init__(self, r: Recorder, program: Program, body: Body) -> None:
        assert program.stage is not None
        self.r, self.program, self.body = r, program, body
        (self.chunk,) = program.stage.chunks

    def evaluate(self, step: int, batch: int, tokens: int) -> None:
        raise NotImplementedError

    def step(self, step: int, tokens: int) -> None:
        for _ in range(min(self.program.job.accumulate, MICRO_BATCHES)):
            self.micro_batch(step, (Dim(self.program.job.batch, "B"), Dim(tokens, "S")))

    def micro_batch(self, step: int, shape: Shape) -> None:
        r, job = self.r, self.program.job
        r.mark("forward", "", step)
        if self.chunk.begins:
            self.body.batch = tuple(
                ops.integers(r, shape, "inputs") for _ in range(2 if job.packing else 3)
            )
        out = self.forward(shape, step)
        if self.chunk.begins:
            self.take_back(shape)
        r.mark("backward", "", step)
        if not self.chunk.ends:  # whoever kept it is done
            out = Tensor(out.shape, out.format, None, out.node, out.needs)
        r.thread = "backward"
        r.backward(
            out,
            r.like(out, "ones_like")
            if self.chunk.ends
            else r.tensor(out.shape, out.format, "to_device"),
        )
        r.thread = "forward"
        del out
        r.let_go(r.kept)
        r.mark("backward", "", step)

    def forward(self, shape: Shape, step: int) -> Tensor:
        """The loss on the last GPU; elsewhere hidden states, which stay as long as the next layer's
        checkpoint wants them."""
        r, program, body = self.r, self.program, self.body
        ctx = context(
            r, program, body.programs, shape, keys=int(shape[1]), training=True, engine=body.engine
        )
        out = body.run_chunk(
            self.chunk, body.batch[0] if self.chunk.begins else self.elsewhere(shape), ctx, step
        )
        if self.chunk.ends:
            labels = ops.integers(r, shape, "to_device")
            out = body.programs.losses[program.job.loss](out, labels, body.model, body.ends, ctx)
        leave_autocast(ctx)
        ctx.returned.clear()
        kept = program.entries[-1].recompute and not body.engine.around
        return (
            out
            if self.chunk.ends or kept
            else Tensor(out.shape, out.format, None, out.node, out.needs)
        )

    def elsewhere(self, shape: Shape) -> Tensor:
        """Hidden states on the GPU before: no bytes of this one."""
        found = Tensor((*shape, self.program.model.width), FORMATS[self.program.hidden], None)
        found.needs = True
        return found

    def take_back(self, shape: Shape) -> None:
        """The logits, in their own dtype and, under autocast, in fp32 (accelerate
        utils/operations.py convert_outputs_to_fp32)."""
        r, program = self.r, self.program
        part, r.part = r.part, "logits"
        logits = r.tensor(
            (*shape, program.model.vocab), FORMATS[program.autocast or program.hidden], "to_device"
        )
        wide = r.tensor(logits.shape, FP32, "float") if program.autocast else None
        del logits, wide
        r.part = part


def overlay(programs: Programs, program: Program) -> Programs:
    return programs.replace(stages=Dealt)


__all__ = ["Dealt", "overlay"]
