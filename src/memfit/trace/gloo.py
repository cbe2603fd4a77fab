"""What gloo's collectives take on the CPU beside their operands, for a trace that acts as a rank
there: real ranks judge it.

Read from torch 2.13 torch/csrc/distributed/c10d/ProcessGroupGloo.cpp and watched under its
profiler. A sum over the ranks, a broadcast and what goes from one rank to another take nothing:
gloo's own buffers are no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from memfit.trace.hidden import Hidden
from memfit.trace.hidden_cpu import CPU, size_of
from memfit.trace.ops import collect

Taken: TypeAlias = Callable[[Any, Any, Any, Any], list[Hidden]]


def install() -> None:
    """Needs the operators of torch.distributed, which exist once it is imported."""
    c10d, functional = torch.ops.c10d, torch.ops._c10d_functional
    CPU.update(
        dict.fromkeys((c10d._allgather_base_.default, c10d.allgather_.default), sent(gathered))
    )
    CPU[functional.all_gather_into_tensor.default] = sent(gathered_by_function)
    CPU[c10d._reduce_scatter_base_.default] = sent(scattered)
    CPU[functional.reduce_scatter_tensor.default] = sent(scattered_by_function)


def sent(taken: Taken) -> Taken:
    """Nothing where a group sends nothing (torch 2.13
    torch/csrc/distributed/c10d/FakeProcessGroup.hpp)."""
    return lambda recorder, args, kwargs, result: (
        taken(recorder, args, kwargs, result) if recorder.sends else []
    )


def gathered(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """The flight recorder asks a work for its outputs, and gets a tensor like the whole
    (`getOutputTensors`); gloo's thread then gathers into a flat one that it copies from
    (`AsyncAllgatherWork`)."""
    outputs: list[torch.Tensor] = []
    collect(args[:1], outputs)
    whole = sum(size_of(one) for one in outputs)
    return [Hidden("outputs", whole, brief=True), Hidden("flat", whole, brief=True)]


def gathered_by_function(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """The same, but the first is of a rank's part (`AsyncAllgatherCoalescedWork`)."""
    return [
        Hidden("outputs", size_of(args[0]), brief=True),
        Hidden("flat", size_of(args[0]) * args[1], brief=True),
    ]


def scattered(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """All is summed in a copy of the input, of which a part is taken
    (`reduce_scatter_tensor_coalesced`)."""
    return [Hidden("sums", size_of(args[1]), brief=True)]


def scattered_by_function(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    return [Hidden("sums", size_of(args[0]), brief=True)]


__all__ = ["install"]
