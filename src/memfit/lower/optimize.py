"""The optimizer's step: states that appear at the first one, temporaries of every one, gradients that go."""

from __future__ import annotations

from memfit.formats import FP32, Format
from memfit.lower.recorder import Recorder, Tensor
from memfit.optimizers import Optimizer

Spans = list[tuple[str, list[Tensor]]]


class Stepper:
    """Runs one optimizer over the trained tensors, span by span so that identical layers stay comparable."""

    def __init__(self, r: Recorder, optimizer: Optimizer, spans: Spans) -> None:
        self.r, self.optimizer, self.spans = r, optimizer, spans
        self.states: list[Tensor] = []
        self.ready = False

    def step(self, step: int) -> None:
        if not self.ready:
            self.make_states(step)
        if self.optimizer.way == "foreach":
            self.foreach(step)

    def make_states(self, step: int) -> None:
        self.ready = True
        for where, tensors in self.spans:
            self.r.mark("step", where, step)
            for tensor in tensors:
                for state in self.optimizer.states:
                    self.states.append(self.state(tensor, state))

    def state(self, tensor: Tensor, state: str) -> Tensor:
        return self.r.tensor(tensor.shape, state_format(tensor, state), "state", "optimizer")

    def foreach(self, step: int) -> None:
        """One list of temporaries for all tensors of a dtype; the last dtype's list lives until the step returns, and each
        new one is made while the old one is still held (torch 2.13 optim/adam.py _multi_tensor_adam)."""
        held: list[Tensor] = []
        for format in formats(self.spans):
            fresh: list[Tensor] = []
            for where, tensors in self.spans:
                self.r.mark("step", where, step)
                for tensor in tensors:
                    if tensor.format is format:
                        fresh += [self.r.tensor(tensor.shape, format, "foreach") for _ in range(self.optimizer.temporary)]
            self.release(held, step)
            held = fresh
            del fresh
        self.release(held, step)

    def release(self, held: list[Tensor], step: int) -> None:
        """Free a list in order, span by span."""
        per_tensor = self.optimizer.temporary
        held.reverse()
        for where, tensors in self.spans:
            self.r.mark("step", where, step)
            for _ in range(min(len(held), per_tensor * len(tensors))):
                held.pop()

    def drop_gradients(self, step: int) -> None:
        for where, tensors in self.spans:
            self.r.mark("step", where, step)
            for tensor in tensors:
                tensor.grad = None


def formats(spans: Spans) -> list[Format]:
    """Dtypes in order of first appearance, as torch groups its lists."""
    found: list[Format] = []
    for _, tensors in spans:
        for tensor in tensors:
            if tensor.format not in found:
                found.append(tensor.format)
    return found


def state_format(tensor: Tensor, state: str) -> Format:
    return FP32 if state.startswith("fp32") else tensor.format
