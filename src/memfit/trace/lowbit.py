"""Optimizers with states in few bits whose kernels need a GPU, or a package that nobody offers: the
same tensors kept and made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from memfit.trace import lowbit_cpu

# bitsandbytes 0.50 optim/optimizer.py min_8bit_size; torchao 0.18 optim/adam.py _new_buffer
SMALLEST_8BIT = 4096
SMALLEST_PAGED = 100_000  # bitsandbytes 0.50 optim/optimizer.py get_state_buffer
# both: values that share a constant (transformers 5.23 trainer_optimizer.py asks torchao for it)
BLOCK = 256


class BlockwiseOptimizer(torch.optim.Optimizer):
    """What bitsandbytes keeps: 1-byte states with one fp32 constant per 256 values, fp32 for small
    tensors, paged ones off the GPU.

    bitsandbytes 0.50 optim/optimizer.py `init_state`; its kernels for CUDA work in place. `wide`:
    parameters that keep fp32 states (the Trainer of transformers asks that for embeddings).
    `doubled`: the first state is two in one tensor (optim/ademamix.py). `kind`: the rule of its
    step, which a CPU runs in torch; nothing is paged there.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        states: int,
        bits: int = 8,
        paged: bool = False,
        wide: Iterable[torch.Tensor] = (),
        doubled: bool = False,
        kind: str = "",
    ) -> None:
        super().__init__(parameters, {"lr": 1e-4})
        self.kind = kind
        self.states, self.bits, self.paged, self.wide = (
            states,
            bits,
            paged,
            {id(one) for one in wide},
        )
        self.doubled = doubled
        self.maps: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                if not self.state[one]:
                    self.fill(one)
                if self.kind and one.device.type == "cpu":
                    lowbit_cpu.step(self.kind, one, self.state[one])

    def fill(self, one: torch.Tensor) -> None:
        state, count = self.state[one], one.numel()
        small = self.bits == 32 or count < SMALLEST_8BIT or id(one) in self.wide
        kind = torch.float32 if small else torch.uint8
        for index in range(1, self.states + 1):
            twice = (2,) if self.doubled and index == 1 else ()
            if not small:
                state[f"qmap{index}"] = self.maps.setdefault(
                    f"qmap{index}", torch.empty(256, dtype=torch.float32, device=one.device)
                )
                state[f"absmax{index}"] = torch.zeros(
                    (*twice, -(-count // BLOCK)), dtype=torch.float32, device=one.device
                )
            if self.paged and count >= SMALLEST_PAGED and one.device.type != "cpu":
                state[f"state{index}"] = "managed"  # cudaMallocManaged: not the allocator's
            else:
                state[f"state{index}"] = torch.zeros(
                    (*twice, *one.shape), dtype=kind, device=one.device
                )


class Optimizer2State(BlockwiseOptimizer):
    """The base that packages build on (bitsandbytes 0.50 optim/optimizer.py), its kernels
    left out."""

    def __init__(
        self,
        name: str,
        params: Any,
        lr: float = 1e-3,
        *given: Any,
        is_paged: bool = False,
        **_: Any,
    ) -> None:
        bits = given[3] if len(given) > 3 else 32
        super().__init__(params, states=2, bits=bits, paged=is_paged)
        self.initialized, self.is_paged = False, is_paged
        for group in self.param_groups:
            group.setdefault("weight_decay", 0.0)
            group["lr"] = lr

    def check_overrides(self) -> None: ...
    def to_gpu(self) -> None: ...
    def prefetch_state(self, one: torch.Tensor) -> None: ...

    def init_state(self, group: Any, one: torch.Tensor, gindex: int, pindex: int) -> None:
        self.state[one]["step"] = 0
        self.fill(one)

    def update_step(self, group: Any, one: torch.Tensor, gindex: int, pindex: int) -> None:
        self.state[one]["step"] += 1


class TorchaoAdamW(torch.optim.Optimizer):
    """What torchao's AdamW keeps: codes, a scale per block and a table of its own for each state
    (torchao 0.18 optim/adam.py, subclass_8bit.py, subclass_4bit.py). Its step is compiled,
    parameter by parameter: between its kernels both averages stand in fp32, and codes of 4 bits in
    int64 (`memfit.optimizers`)."""

    def __init__(self, parameters: Iterable[torch.Tensor], *, bits: int) -> None:
        super().__init__(parameters, {"lr": 1e-4})
        self.bits = bits

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None and not self.state[one]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.fill(one, name)
                if one.grad is not None:
                    kinds = [torch.float32] * 2 + ([torch.int64] * 2 if self.bits == 4 else [])
                    between = [torch.empty_like(one, dtype=kind) for kind in kinds]
                    del between

    def fill(self, one: torch.Tensor, name: str) -> None:
        state, count = self.state[one], one.numel()
        if count < SMALLEST_8BIT or count % BLOCK:
            state[name] = torch.zeros_like(one)
            return
        state[f"{name}.codes"] = torch.zeros(
            count * self.bits // 8, dtype=torch.uint8, device=one.device
        )
        state[f"{name}.scale"] = torch.zeros(count // BLOCK, dtype=torch.float32, device=one.device)
        state[f"{name}.qmap"] = torch.empty(2**self.bits, dtype=torch.float32, device=one.device)


class AnyPrecision(torch.optim.Optimizer):
    """torchdistx' AnyPrecisionAdamW as the Trainer sets it: both averages in fp32, no compensation
    (torchdistx 0.2 optimizers/anyprecision_optimizer.py, which no index offers any more)."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                if not state:
                    state |= {
                        name: torch.zeros_like(one, dtype=torch.float32)
                        for name in ("exp_avg", "exp_avg_sq")
                    }
                average, square = state["exp_avg"].mul_(0.9), state["exp_avg_sq"].mul_(0.999)
                average.add_(one.grad)
                square.addcmul_(one.grad, one.grad)
                root = (square.sqrt() / 0.5).add_(1e-8)
                one.data.addcdiv_(average, root, value=-1e-4)


class Grok(torch.optim.Optimizer):
    """grokadamw's update (0.1.2 grokadamw.py): its three states live on the host, and come over for
    their parameter's turn."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                average = torch.empty_like(one)
                square = torch.empty_like(one)
                slow = torch.empty_like(one)
                torch.nn.utils.clip_grad_norm_(one, 1.0)
                slow.mul_(0.98).add_(one.grad, alpha=0.02)
                total = one.grad + 2.0 * slow
                average.mul_(0.9).add_(total, alpha=0.1)
                square.mul_(0.999).addcmul_(total, total, value=0.001)
                one.addcdiv_(average, square.sqrt().add_(1e-8), value=-1e-4)
