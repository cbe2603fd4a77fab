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
from memfit.lower.recorder import Tensor
from memfit.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from memfit.lower.body import Body


class Megatron(Engine):
    last = True

    def stepper(self, body: Body) -> Stepper:
        program = self.program
        apart = frozenset(weight.name for layer, _ in program.model.kinds for weight in layer.weights() if weight.role == "expert")
        spans = self.spans(body)

        def shares(tensor: Tensor) -> int:
            return program.expert_shares if tensor.name in apart else program.shares

        return Stepper(self.r, OPTIMIZERS[program.job.optimizer], spans, master=program.master, shares=shares)

    def begin(self, last: bool) -> None:
        self.last = last

    def finish(self) -> None:
        """Gradients are summed after the last micro-batch."""
        if self.last:
            self.tell("reduce_scatter" if self.sharded else "all_reduce", FP32.block_bytes)

    def stepped(self, step: int) -> None:
        if self.sharded:
            self.tell("all_gather", BF16.block_bytes)

    @property
    def sharded(self) -> bool:
        ddp = self.program.strategy.ddp
        return ddp is not None and ddp.distributed

    def tell(self, op: str, bytes: int) -> None:
        """Experts' values are summed among the ranks that hold the same ones."""
        strategy, model = self.program.strategy, self.program.model
        experts = sum(weight.count for weight in model.weights() if weight.role == "expert")
        groups = (("dp", strategy.data * strategy.size("cp"), model.parameters - experts), ("edp", strategy.expert_data, experts))
        for name, ranks, count in groups:
            if ranks > 1 and count:
                self.r.comm(op, bytes * count, ranks, name)


ENGINE = Megatron
