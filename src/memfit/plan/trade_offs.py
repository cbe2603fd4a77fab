"""The trade-offs of a candidate against the most exact and simplest configuration, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from memfit.job import Job
from memfit.strategy import Strategy
from memfit.techniques.framework import facts_of

Row: TypeAlias = "tuple[Callable[[Job, Strategy], bool], str]"
GIVES: tuple[Row, ...] = (
    (lambda job, one: job.method == "lora", "only adapters are trained"),
    (lambda job, one: job.method == "qlora", "only adapters are trained, on 4-bit weights"),
    (lambda job, one: narrow(job, one), "weights are updated in 16 bits"),
    (lambda job, one: "8bit" in job.optimizer, "8-bit optimizer states"),
    (
        lambda job, one: not job.training and job.cache == "quantized",
        "quantized KV cache, except the last 128 tokens",
    ),
    (lambda job, one: job.checkpointing != "none", "activations are recomputed"),
    (
        lambda job, one: job.activation_offload != "none",
        "CPU memory for activations, and copies over PCIe",
    ),
    (lambda job, one: job.loss == "liger" or job.liger, "needs liger-kernel"),
    (lambda job, one: job.attention.startswith("flash-attn"), "needs flash-attn"),
    (lambda job, one: one.zero is not None and one.zero.size > 1, "needs deepspeed"),
    (
        lambda job, one: one.fsdp is not None and one.fsdp.size > 1,
        "sharded checkpoints, to be merged for use",
    ),
    (
        lambda job, one: one.zero is not None and one.zero.stage == 3,
        "sharded checkpoints, to be merged for use",
    ),
    (lambda job, one: one.offloads, "CPU memory, and copies over PCIe"),
    (
        lambda job, one: job.training and one.size("tp") * one.size("pp") * one.size("ep") > 1,
        "checkpoints sharded by layer or matrix",
    ),
)


def narrow(job: Job, strategy: Strategy) -> bool:
    """DeepSpeed and Megatron keep fp32 copies whatever the precision is called."""
    return (
        job.training
        and job.method == "full"
        and job.precision in ("bf16", "fp16")
        and strategy.zero is None
        and not facts_of(job.framework).master
    )


def gives_up(job: Job, strategy: Strategy) -> Iterator[str]:
    yield from dict.fromkeys(words for counts, words in GIVES if counts(job, strategy))


__all__ = ["GIVES", "gives_up"]
