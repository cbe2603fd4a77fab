"""A trace told to act as a CPU against real steps and answers there, in the ways that
`test_trace_truth` has no column for."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.torch.real_steps import Changes, Loop, generated, real, traced  # noqa: E402
from tests.torch.small import CONFIGS, Small  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.tape import check  # noqa: E402
from memfit.trace import trace_config  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning"
)  # transformers' and PEFT's own, in the real steps
LARGE = 5000  # smaller blocks include scratch of CPU kernels, which a GPU does not have


def trace(config: dict[str, Any], **options: Any) -> Changes:
    tape = trace_config(config, Job(batch=2, seq=64, precision="fp32", **options), device="cpu")
    check(tape)
    return traced(tape)


def answered(config: dict[str, Any], **options: Any) -> Changes:
    job = Job(task="inference", batch=2, seq=64, new_tokens=4, precision="fp32", **options)
    return traced(trace_config(config, job, device="cpu", decode_all=True))


def compare(found: Changes, truth: Changes) -> None:
    assert (
        abs(found.before - truth.before) <= 256
    )  # step counters of 4 bytes, which live on the CPU in any case
    assert abs(found.peak - truth.peak) <= 0.0005 * truth.peak
    assert found.allocations(LARGE) == truth.allocations(LARGE)


def done(name: str, **loop: Any) -> Changes:
    return real(Small(config=CONFIGS[name]), Loop(**loop))


def test_two_threads() -> None:
    """Attention keeps a buffer for each."""
    torch.set_num_threads(2)
    try:
        compare(trace(CONFIGS["llama"]), done("llama"))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("checkpoint", [None, {"use_reentrant": False}])
def test_adapters(dropout: float, checkpoint: dict[str, Any] | None) -> None:
    settings = {
        "r": 16,
        "lora_alpha": 32,
        "lora_dropout": dropout,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
    }
    found = trace(
        CONFIGS["llama"],
        method="lora",
        dropout=dropout,
        checkpointing="full" if checkpoint else "none",
    )
    compare(found, done("llama", lora=settings, checkpoint=checkpoint))


def test_modules_saved_whole() -> None:
    settings = {
        "r": 4,
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": ["lm_head"],
        "task_type": "CAUSAL_LM",
    }
    found = trace(
        CONFIGS["qwen2"], method="lora", rank=4, targets="q_proj,v_proj", modules_to_save="lm_head"
    )
    compare(found, done("qwen2", lora=settings))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3_moe", "falcon", "deepseek_v3"])
def test_generate(name: str) -> None:
    compare(answered(CONFIGS[name]), generated(CONFIGS[name]))


@pytest.mark.parametrize(
    ("cache", "settings"),
    [("static", {"cache_implementation": "static"}), ("none", {"use_cache": False})],
)
def test_caches(cache: str, settings: dict[str, Any]) -> None:
    compare(answered(CONFIGS["llama"], cache=cache), generated(CONFIGS["llama"], **settings))
