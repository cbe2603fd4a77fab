"""A trace told to act as a CPU against real steps there: the same peak, and the same allocations in the same order."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.torch.real_steps import CONFIGS, Changes, generated, real, traced  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.tape import check  # noqa: E402
from memfit.trace import trace_config  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # transformers' and PEFT's own, in the real steps
RNG_STATE = 5056  # of the CPU, which checkpointing keeps for each layer; a trace has none
LARGE = RNG_STATE + 1  # smaller blocks include scratch of CPU kernels, which a GPU does not have
SCRATCH = {"mamba", "qwen3_next", "mpt"}  # oneDNN repacks convolutions; CPU kernels copy an integer operand that is promoted


def trace(config: dict[str, Any], **options: Any) -> Changes:
    tape = trace_config(config, Job(batch=2, seq=64, precision="fp32", **options), device="cpu")
    check(tape)
    return traced(tape)


def answered(config: dict[str, Any], **options: Any) -> Changes:
    job = Job(task="inference", batch=2, seq=64, new_tokens=4, precision="fp32", **options)
    return traced(trace_config(config, job, device="cpu", decode_all=True))


def compare(found: Changes, truth: Changes, order: bool = True, states: int = 0) -> None:
    assert abs(found.before - truth.before) <= 256  # step counters of 4 bytes, which live on the CPU in any case
    assert abs(found.peak - truth.peak) <= 0.0005 * truth.peak + states * RNG_STATE
    if order:
        assert found.allocations(LARGE) == truth.allocations(LARGE)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_family_equals_the_real_step(name: str) -> None:
    compare(trace(CONFIGS[name]), real(CONFIGS[name]), order=name not in SCRATCH)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(name: str, reentrant: bool) -> None:
    found = trace(CONFIGS[name], checkpointing="full", reentrant=reentrant)
    compare(found, real(CONFIGS[name], checkpoint={"use_reentrant": reentrant}), states=4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon"])
def test_eager_attention(name: str) -> None:
    compare(trace(CONFIGS[name], attention="eager"), real(CONFIGS[name], attention="eager"))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("checkpoint", [None, {"use_reentrant": False}])
def test_adapters(dropout: float, checkpoint: dict[str, Any] | None) -> None:
    settings = {"r": 16, "lora_alpha": 32, "lora_dropout": dropout, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    found = trace(CONFIGS["llama"], method="lora", dropout=dropout, checkpointing="full" if checkpoint else "none")
    compare(found, real(CONFIGS["llama"], lora=settings, checkpoint=checkpoint), states=4 if checkpoint else 0)


def test_modules_saved_whole() -> None:
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM"}
    found = trace(CONFIGS["qwen2"], method="lora", rank=4, targets="q_proj,v_proj", modules_to_save="lm_head")
    compare(found, real(CONFIGS["qwen2"], lora=settings))


def test_accumulation_and_clipping() -> None:
    compare(trace(CONFIGS["llama"], accumulate=2, clip=1.0), real(CONFIGS["llama"], accumulate=2, clip=1.0))


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda trained: torch.optim.SGD(trained, lr=1e-3),
    "sgd_momentum": lambda trained: torch.optim.SGD(trained, lr=1e-3, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adamw_loop": lambda trained: torch.optim.AdamW(trained, foreach=False),
    "adamw_fused": lambda trained: torch.optim.AdamW(trained, fused=True),
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_optimizers(name: str) -> None:
    compare(trace(CONFIGS["llama"], optimizer=name), real(CONFIGS["llama"], optimizer=OPTIMIZERS[name]))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3_moe", "falcon", "deepseek_v3"])
def test_generate(name: str) -> None:
    compare(answered(CONFIGS[name]), generated(CONFIGS[name]))


@pytest.mark.parametrize(("cache", "settings"), [("static", {"cache_implementation": "static"}), ("none", {"use_cache": False})])
def test_caches(cache: str, settings: dict[str, Any]) -> None:
    compare(answered(CONFIGS["llama"], cache=cache), generated(CONFIGS["llama"], **settings))
