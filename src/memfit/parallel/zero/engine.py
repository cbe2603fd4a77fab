"""What the stages of DeepSpeed's ZeRO share: parameters in groups, as the optimizer has them, and
fp32 copies that step in place of them (deepspeed 0.19.8 runtime/zero/, runtime/engine.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.formats import BF16, FORMATS, FP16, FP32
from memfit.lower.engine import Weights, known_as_parameters
from memfit.lower.engine_hooks import Hooked
from memfit.lower.load import recast
from memfit.lower.optimize import Names, Stepper
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.optimizers import OPTIMIZERS, Optimizer
from memfit.parallel.zero.partitions import NORM
from memfit.program import Program
from memfit.strategy import Strategy

if TYPE_CHECKING:
    from memfit.lower.body import Body


class ZeRO(Hooked):
    """What is said once for all stages."""

    scripted = True
    repeats = False  # gradients stand in buffers that come and go over micro-batches
    casts_adapters = True
    # of linear layers, which save the parameter (runtime/zero/linear.py
    # LinearFunctionForZeroStage3)
    own_products = False
    clips = False  # the norm is taken in any case, of partitions

    def __init__(self, r: Recorder, program: Program) -> None:
        super().__init__(r, program)
        assert program.strategy.zero is not None
        self.layout = replace(program.strategy.zero, size=program.strategy.partitions)
        self.ranks, self.rank = self.layout.size, program.strategy.rank % self.layout.size
        self.format = FORMATS[program.weights]
        self.wire = (
            FP32 if program.strategy.size("cp") > 1 else self.format
        )  # gradients on their way (`seq_parallel_communication_data_type`)
        self.last = True

    @staticmethod
    def foldable(strategy: Strategy) -> bool:
        """What is in a bucket, or is gathered ahead, differs from layer to layer."""
        return False

    @staticmethod
    def passing(strategy: Strategy) -> Strategy:
        """What a rank keeps for itself or on the host is the engine's; modules are gathered in
        stage 3 alone. Ranks that split a sequence run passes of their own."""
        zero = strategy.zero
        if zero is None or strategy.size("cp") * strategy.size("tp") > 1:
            return strategy
        here = replace(
            zero, stage=max(2, zero.stage), offload_optimizer="none", offload_param="none"
        )
        return replace(strategy, rank=0, zero=here)

    def cast(self, body: Body) -> None:
        """Every parameter is in the numbers of the training (runtime/engine.py
        _cast_module_mixed_precision)."""
        if self.format is FP32:
            return
        for bound in (body.ends, *body.layers):
            body.r.mark("prepare", bound.prefix)
            for name in [
                name for name, tensor in bound.parameters() if tensor.format in (BF16, FP16, FP32)
            ]:
                if bound[name].format is not self.format:
                    recast(bound, name, self.format)
            if not self.casts_adapters:
                continue
            adapters = [linear.adapter for linear in bound.linears.values()] + list(
                bound.stacks.values()
            )
            for adapter in (one for one in adapters if one is not None):
                adapter.a, adapter.b = (
                    self.converted(body.r, adapter.a),
                    self.converted(body.r, adapter.b),
                )
        body.r.leave()

    def converted(self, r: Recorder, leaf: Tensor) -> Tensor:
        if leaf.format is self.format:
            return leaf
        r.where = r.span
        return r.leaf(leaf.shape, self.format, leaf.name, "weights", leaf.needs)

    def groups(self, body: Body) -> list[list[Tensor]]:
        """Trained parameters in the Trainer's two groups, with weight decay and without: norms and
        biases, which have one dimension (transformers 5.23 trainer.py get_decay_parameter_names).
        """
        trained = [tensor for _, tensors in body.trained() for tensor in tensors]
        split = [
            [one for one in trained if len(one.shape) > 1],
            [one for one in trained if len(one.shape) <= 1],
        ]
        return [group for group in split if group]

    def weights(self, body: Body) -> Weights:
        return known_as_parameters(body, whole=self.own_products)

    def begin(self, last: bool) -> None:
        self.last = last


class FlatStepper(Stepper):
    """Steps flat fp32 partitions, one after the other. `gradient` gives the one of a partition,
    `before` and `after` stand around them all."""

    def __init__(
        self,
        r: Recorder,
        optimizer: Optimizer,
        masters: Sequence[Tensor],
        gradient: Callable[[int], Tensor | None],
    ) -> None:
        self.masters, self.gradient = list(masters), gradient
        super().__init__(r, optimizer, [("", list(masters))], Names)

    def step(self, step: int) -> None:
        for index, master in enumerate(self.masters):
            master.grad = self.gradient(index)
            self.spans = [("", [master])]
            super().step(step)
            master.grad = None
        self.spans = self.model_spans


def stepper_of(
    engine: ZeRO, masters: Sequence[Tensor], gradient: Callable[[int], Tensor | None]
) -> FlatStepper:
    return FlatStepper(engine.r, OPTIMIZERS[engine.program.job.optimizer], masters, gradient)


def overlap(start: int, size: int, first: int, last: int) -> int:
    """Values that [start, start + size) has in [first, last)."""
    return max(0, min(start + size, last) - max(start, first))


def norm(r: Recorder, counts: Iterator[int] | Sequence[int], stream: int = 0) -> None:
    """Of each gradient a wide copy, for a moment (runtime/zero/stage_1_and_2.py
    get_grad_norm_direct)."""
    for count in counts:
        copy = r.scratch(NORM * count, "norm", "temporaries", stream)
        del copy


__all__ = ["FlatStepper", "ZeRO", "norm", "overlap", "stepper_of"]
