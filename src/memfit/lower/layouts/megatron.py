"""Megatron's own data parallelism (megatron-core 0.16.1): fp32 gradients lie in one buffer on every rank and are summed up in place, so that
nothing comes and goes; with the distributed optimizer every rank keeps a share of the fp32 copies and of the states
(distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py).

Left out: the padding of that buffer (each tensor's start to 64 values, its end to a multiple of the ranks), the parameters' own buffer before
they are moved into it (a moment of loading), and what buckets overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.formats import BF16, FP32
from memfit.lower.layouts.base import Engine
from memfit.lower.optimize import Stepper
from memfit.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from memfit.lower.body import Body


class Megatron(Engine):
    last = True

    def stepper(self, body: Body) -> Stepper:
        program = self.program
        return Stepper(self.r, OPTIMIZERS[program.job.optimizer], self.spans(body), master=program.master, shares=program.shares)

    def begin(self, last: bool) -> None:
        self.last = last

    def finish(self) -> None:
        """Gradients are summed after the last micro-batch."""
        if self.last:
            self.tell("reduce_scatter" if self.program.shares > 1 else "all_reduce", FP32.block_bytes)

    def stepped(self, step: int) -> None:
        if self.program.shares > 1:
            self.tell("all_gather", BF16.block_bytes)

    def tell(self, op: str, bytes: int) -> None:
        ranks = self.program.strategy.data * self.program.strategy.size("cp")
        if ranks > 1:
            self.r.comm(op, bytes * self.program.model.parameters, ranks, "dp")


ENGINE = Megatron
