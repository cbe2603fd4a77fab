"""The optimizer of a Job: torch's and transformers' own, and stand-ins for bitsandbytes', which need a GPU to import kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from memfit.errors import InputError
from memfit.optimizers import OPTIMIZERS

SMALLEST_8BIT = 4096  # bitsandbytes 0.50 optim/optimizer.py min_8bit_size
SMALLEST_PAGED = 100_000  # same, get_state_buffer
BLOCK = 256  # same, blockwise quantization of the states


class BlockwiseOptimizer(torch.optim.Optimizer):
    """What bitsandbytes keeps: 1-byte states with one fp32 constant per 256 values, fp32 for small tensors, paged ones off the GPU.

    bitsandbytes 0.50 optim/optimizer.py `init_state`; its kernels work in place. `wide`: parameters that keep fp32 states
    (the Trainer of transformers asks that for embeddings).
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], *, states: int, bits: int, paged: bool, wide: Iterable[torch.Tensor] = ()
    ) -> None:
        super().__init__(parameters, {"lr": 1e-4})
        self.states, self.bits, self.paged, self.wide = states, bits, paged, {id(one) for one in wide}
        self.maps: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None and not self.state[one]:
                    self.fill(one)

    def fill(self, one: torch.Tensor) -> None:
        state, count = self.state[one], one.numel()
        small = self.bits == 32 or count < SMALLEST_8BIT or id(one) in self.wide
        for index in range(1, self.states + 1):
            if self.paged and count >= SMALLEST_PAGED:
                state[f"state{index}"] = "managed"  # cudaMallocManaged: not the allocator's
            else:
                state[f"state{index}"] = torch.zeros_like(one, dtype=torch.float32 if small else torch.uint8)
            if not small:
                state[f"qmap{index}"] = self.maps.setdefault(f"qmap{index}", torch.empty(256, dtype=torch.float32, device=one.device))
                state[f"absmax{index}"] = torch.zeros(-(-count // BLOCK), dtype=torch.float32, device=one.device)


class Lion(torch.optim.Optimizer):
    """lion-pytorch 0.2's update, parameter by parameter: one state, and the interpolated sign as the temporary."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                if not self.state[one]:
                    self.state[one]["exp_avg"] = torch.zeros_like(one)
                average = self.state[one]["exp_avg"]
                one.mul_(1.0)
                one.add_(average.clone().mul_(0.9).add(one.grad, alpha=0.1).sign_(), alpha=-1e-4)
                average.mul_(0.99).add_(one.grad, alpha=0.01)


def makers(parameters: list[torch.Tensor], model: Any) -> dict[str, Callable[[], torch.optim.Optimizer]]:
    optim = torch.optim
    embeddings = [one.weight for one in model.modules() if isinstance(one, torch.nn.Embedding)]

    def blockwise(states: int, bits: int = 8, paged: bool = False) -> Callable[[], torch.optim.Optimizer]:
        return lambda: BlockwiseOptimizer(parameters, states=states, bits=bits, paged=paged, wide=embeddings)

    def adafactor() -> torch.optim.Optimizer:
        from transformers.optimization import Adafactor

        return Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)  # as the Trainer makes it

    return {
        "adamw": lambda: optim.AdamW(parameters),
        "adamw_fused": lambda: optim.AdamW(parameters, fused=True),
        "adamw_loop": lambda: optim.AdamW(parameters, foreach=False),
        "adam": lambda: optim.Adam(parameters),
        "adam_fused": lambda: optim.Adam(parameters, fused=True),
        "sgd": lambda: optim.SGD(parameters, lr=1e-3),
        "sgd_momentum": lambda: optim.SGD(parameters, lr=1e-3, momentum=0.9),
        "rmsprop": lambda: optim.RMSprop(parameters),
        "adagrad": lambda: optim.Adagrad(parameters),
        "adafactor": adafactor,
        "lion": lambda: Lion(parameters),
        "adamw_8bit": blockwise(2),
        "paged_adamw_8bit": blockwise(2, paged=True),
        "paged_adamw": blockwise(2, bits=32, paged=True),
        "lion_8bit": blockwise(1),
    }


def optimizer_of(model: Any, name: str) -> torch.optim.Optimizer:
    """The optimizer called `name` over the trainable parameters."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    known = makers(parameters, model)
    name = OPTIMIZERS.find(name).name
    if name not in known:
        raise InputError.one(f"the trace cannot run optimizer `{name}`", where="job.optimizer", hint="one of " + ", ".join(known))
    return known[name]()
