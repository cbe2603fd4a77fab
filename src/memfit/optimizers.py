"""Optimizers, a row each: what they keep per parameter, and what their step holds for a moment.

`states` are copies of the parameter's size; `temporary` is how many lists of tensors, each as large as all trainable
parameters of one dtype, are alive at once inside `step`. Read from torch 2.13 `torch/optim/*.py`, bitsandbytes 0.50
`optim/optimizer.py` and transformers 5.23 `optimization.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memfit.registry import Registry

State = Literal["like", "fp32", "int8", "int8_paged", "fp32_paged", "factored"]
Way = Literal["foreach", "fused", "loop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """`states`: one entry a tensor kept per parameter. `temporary`: parameter-sized tensors alive at once in a step, for the
    whole list (`foreach`) or for one parameter at a time (`loop`). `step_scalar`: the step counter lives on the GPU."""

    name: str
    states: tuple[State, ...]
    temporary: int
    way: Way
    eager_states: bool = False  # allocated in the constructor, not at the first step
    step_scalar: bool = False
    clones_gradient: bool = False  # the first step clones the gradient into the state
    cite: str = ""


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", where="job.optimizer")


def _row(name: str, states: tuple[State, ...], temporary: int, way: Way, cite: str, *aliases: str, **more: bool) -> None:
    OPTIMIZERS.add(name, Optimizer(name=name, states=states, temporary=temporary, way=way, cite=cite, **more), *aliases)


_TORCH = "torch 2.13 torch/optim/{}.py"
_row("adamw", ("like", "like"), 1, "foreach", _TORCH.format("adam"), "adamw_torch", "adamw_foreach")
_row("adamw_fused", ("like", "like"), 0, "fused", _TORCH.format("adam"), "adamw_torch_fused", step_scalar=True)
_row("adamw_loop", ("like", "like"), 2, "loop", _TORCH.format("adam"))
_row("adam", ("like", "like"), 1, "foreach", _TORCH.format("adam"))
_row("adam_fused", ("like", "like"), 0, "fused", _TORCH.format("adam"), step_scalar=True)
_row("sgd", (), 0, "foreach", _TORCH.format("sgd"))
_row("sgd_momentum", ("like",), 0, "foreach", _TORCH.format("sgd"), clones_gradient=True)
_row("rmsprop", ("like",), 1, "foreach", _TORCH.format("rmsprop"))
_row("adagrad", ("like",), 2, "foreach", _TORCH.format("adagrad"), eager_states=True)
_row("adafactor", ("factored",), 2, "loop", "transformers 5.23 optimization.py Adafactor")
_row("lion", ("like",), 1, "loop", "lion-pytorch 0.2 lion_pytorch.py")
_row("adamw_8bit", ("int8", "int8"), 0, "fused", "bitsandbytes 0.50 optim/optimizer.py", "adamw_bnb_8bit")
_row("paged_adamw_8bit", ("int8_paged", "int8_paged"), 0, "fused", "bitsandbytes 0.50 optim/optimizer.py")
_row("paged_adamw", ("fp32_paged", "fp32_paged"), 0, "fused", "bitsandbytes 0.50 optim/optimizer.py", "paged_adamw_32bit")
_row("lion_8bit", ("int8",), 0, "fused", "bitsandbytes 0.50 optim/optimizer.py")
