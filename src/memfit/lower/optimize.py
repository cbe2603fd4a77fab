"""The optimizer's step: states that appear at the first one, temporaries of every one, gradients that go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memfit.formats import FP32, UINT8, Format
from memfit.lower.recorder import Recorder, Tensor
from memfit.optimizers import Optimizer
from memfit.tape import Phase

Spans = list[tuple[str, list[Tensor]]]
SMALLEST_8BIT = 4096  # bitsandbytes 0.50 optim/optimizer.py min_8bit_size
SMALLEST_PAGED = 100_000  # same file, get_state_buffer
BLOCK = 256  # same file: values that share one fp32 constant


class Stepper:
    """Runs one optimizer over the trained tensors, span by span, so that identical layers stay comparable.

    `wide` names the tensors that bitsandbytes' optimizers keep in fp32 (the Trainer asks that for embeddings)."""

    def __init__(
        self, r: Recorder, optimizer: Optimizer, spans: Spans, wide: frozenset[str] = frozenset(), master: bool = False, shares: int = 1
    ) -> None:
        if r.adds:  # fused kernels over all tensors, no lists (TE optimizers/fused_adam.py)
            optimizer = replace(optimizer, way="fused", temporary=0, step_scalar=False)
        self.r, self.optimizer, self.wide = r, optimizer, wide
        self.states: list[Tensor] = []
        self.maps: list[Tensor] = []
        self.model_spans = spans
        self.spans = self.copied(spans, shares) if master else spans
        self.master = master
        self.ready = False
        if optimizer.eager_states:
            self.make_states(0)

    def copied(self, spans: Spans, shares: int) -> Spans:
        """fp32 master copies, made before the first step (megatron/core/optimizer/optimizer.py
        Float16OptimizerWithFloat16Params); of each the share of one rank, though really each rank has most of them whole and others not at
        all (core/optimizer/distrib_optimizer.py)."""
        copies: Spans = []
        for where, tensors in spans:
            self.r.mark("prepare", where)
            shapes = [tensor.shape if shares == 1 else (-(-tensor.count // shares),) for tensor in tensors]
            copies.append((where, [self.r.tensor(shape, FP32, "master", "master") for shape in shapes]))
        for (_, tensors), (_, masters) in zip(spans, copies, strict=True):
            for tensor, copy in zip(tensors, masters, strict=True):
                copy.name = tensor.name
        return copies

    def step(self, step: int) -> None:
        if self.master and not self.r.adds:
            self.raise_gradients(step)
        if not self.ready:
            self.make_states(step)
        WAYS[self.optimizer.way](self, step)
        for _, tensors in self.spans if self.master else []:
            for tensor in tensors:
                tensor.grad = None

    def raise_gradients(self, step: int) -> None:
        """Each 16-bit gradient becomes fp32 and goes."""
        for (where, tensors), (_, masters) in zip(self.model_spans, self.spans, strict=True):
            self.r.mark("step", where, step)
            for tensor, copy in zip(tensors, masters, strict=True):
                copy.grad = self.r.tensor(copy.shape, FP32, "float", "gradients")
                tensor.grad = None

    def make_states(self, step: int) -> None:
        self.ready = True
        for where, tensors in self.spans:
            self.r.mark("step", where, step)
            for tensor in tensors:
                if self.optimizer.step_scalar:
                    self.states.append(self.r.tensor((1,), FP32, "step", "optimizer"))
                for kind in self.optimizer.states:
                    STATES[kind](self, tensor)

    def keep(self, shape: tuple[int, ...], format: Format) -> None:
        self.states.append(self.r.tensor(shape, format, "state", "optimizer"))

    def blockwise(self, tensor: Tensor, paged: bool = False) -> None:
        """One byte a value and an fp32 constant per block; small tensors and embeddings stay fp32; the code table is shared."""
        if tensor.count < SMALLEST_8BIT or tensor.name in self.wide:
            self.wide_state(tensor, paged)
            return
        if not (paged and tensor.count >= SMALLEST_PAGED):
            self.keep(tensor.shape, UINT8)
        if len(self.maps) < len(self.optimizer.states):
            self.maps.append(self.r.tensor((256,), FP32, "code", "optimizer"))
        self.keep((-(-tensor.count // BLOCK),), FP32)

    def wide_state(self, tensor: Tensor, paged: bool = False) -> None:
        """fp32; a large paged state is managed memory, which the allocator never sees."""
        if not (paged and tensor.count >= SMALLEST_PAGED):
            self.keep(tensor.shape, FP32)

    def factored(self, tensor: Tensor) -> None:
        """Adafactor: a row and a column of second moments for matrices, all of them for vectors, in fp32; the root mean
        square is a scalar of its own (transformers 5.23 optimization.py)."""
        if len(tensor.shape) >= 2:
            self.keep(tensor.shape[:-1], FP32)
            self.keep((*tensor.shape[:-2], tensor.shape[-1]), FP32)
        else:
            self.keep(tensor.shape, FP32)
        self.keep((1,), FP32)

    def drop_gradients(self, step: int) -> None:
        for where, tensors in self.model_spans:
            self.r.mark("step", where, step)
            for tensor in tensors:
                tensor.grad = None


def foreach(stepper: Stepper, step: int) -> None:
    """Lists of temporaries for all tensors of a dtype, one list after the other; the list before is held while the next is
    made (torch 2.13 optim/adam.py _multi_tensor_adam, adagrad.py)."""
    held: list[tuple[str, list[Tensor]]] = []
    for format in formats(stepper.spans):
        for _ in range(stepper.optimizer.temporary):
            fresh: list[tuple[str, list[Tensor]]] = []
            for where, tensors in stepper.spans:
                stepper.r.mark("step", where, step)
                fresh.append((where, [stepper.r.like(tensor, "foreach") for tensor in tensors if tensor.format is format]))
            release(stepper.r, held, step)
            held = fresh
            del fresh
    release(stepper.r, held, step)


def release(r: Recorder, held: list[tuple[str, list[Tensor]]], step: int, phase: Phase = "step") -> None:
    """A list that goes frees its last item first."""
    while held:
        where, tensors = held.pop()
        r.mark(phase, where, step)
        while tensors:
            tensors.pop()


def loop(stepper: Stepper, step: int) -> None:
    one = LOOPS[stepper.optimizer.name]
    held: list[Tensor] = []
    for where, tensors in stepper.spans:
        stepper.r.mark("step", where, step)
        for tensor in tensors:
            held = one(stepper.r, tensor, held)
    held.clear()


def loop_adam(r: Recorder, tensor: Tensor, held: list[Tensor]) -> list[Tensor]:
    """sqrt, then the quotient, which the variable `denom` keeps into the next parameter (optim/adam.py _single_tensor_adam)."""
    root = r.like(tensor, "sqrt")
    denominator = r.like(tensor, "div")
    del root
    held.clear()
    return [denominator]


def loop_lion(r: Recorder, tensor: Tensor, held: list[Tensor]) -> list[Tensor]:
    """A clone of the average, and the interpolation (lion-pytorch 0.2)."""
    copy = r.like(tensor, "clone")
    update = r.like(tensor, "add")
    del copy, update
    return []


def loop_adafactor(r: Recorder, tensor: Tensor, held: list[Tensor]) -> list[Tensor]:
    """Gradient and parameter in fp32, grad² + ε, the rank-one root, the update; `update` and the fp32 parameter stay in
    their variables until the next parameter takes them (transformers 5.23 optimization.py Adafactor.step)."""
    gradient = r.tensor(tensor.shape, FP32, "float") if tensor.format is not FP32 else None
    old_parameter = held.pop() if held else None
    parameter = r.tensor(tensor.shape, FP32, "float") if tensor.format is not FP32 else None
    del old_parameter
    square = r.tensor(tensor.shape, FP32, "pow")
    total = r.tensor(tensor.shape, FP32, "add")
    del square
    held.clear()
    if len(tensor.shape) >= 2:
        update = r.tensor(tensor.shape, FP32, "mul")
    else:
        root = r.tensor(tensor.shape, FP32, "rsqrt")
        update = r.tensor(tensor.shape, FP32, "mul")
        del root
    del total
    signed = r.tensor(tensor.shape, FP32, "neg")
    del signed, gradient
    return [one for one in (update, parameter) if one is not None]


def formats(spans: Spans) -> list[Format]:
    """Dtypes in order of first appearance, as torch groups its lists."""
    return list(dict.fromkeys(tensor.format for _, tensors in spans for tensor in tensors))


State = Callable[[Stepper, Tensor], None]
STATES: dict[str, State] = {
    "like": lambda stepper, tensor: stepper.keep(tensor.shape, tensor.format),
    "fp32": lambda stepper, tensor: stepper.keep(tensor.shape, FP32),
    "int8": lambda stepper, tensor: stepper.blockwise(tensor),
    "int8_paged": lambda stepper, tensor: stepper.blockwise(tensor, paged=True),
    "fp32_paged": lambda stepper, tensor: stepper.wide_state(tensor, paged=True),
    "factored": lambda stepper, tensor: stepper.factored(tensor),
}
WAYS: dict[str, Callable[[Stepper, int], None]] = {"foreach": foreach, "fused": lambda stepper, step: None, "loop": loop}
LOOPS = {"adamw_loop": loop_adam, "lion": loop_lion, "adafactor": loop_adafactor}
