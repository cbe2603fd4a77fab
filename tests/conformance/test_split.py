"""Tensor parallelism by transformers' own plan, alone and with FSDP2 beside it: the formulas' rank beside the traced one, the first rank and the
last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

from tests.conformance.test_layouts import MIXED  # noqa: E402

from memfit.errors import InputError  # noqa: E402
from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.simulate.memory import memory  # noqa: E402
from memfit.simulate.replay import replay  # noqa: E402
from memfit.strategy import strategy_from  # noqa: E402

SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4000,
    "max_position_embeddings": 1024, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    name: {**SMALL, "model_type": name.partition("-")[0], "tie_word_embeddings": name.endswith("-tied"), **more}
    for name, more in {
        "llama": {}, "llama-tied": {}, "llama-biased": {"attention_bias": True, "mlp_bias": True}, "mistral": {"sliding_window": 64}, "qwen2": {},
        "qwen2-tied": {}, "qwen3": {"head_dim": 32}, "gemma": {"head_dim": 32}, "gemma2-tied": {"head_dim": 32}, "gemma3_text-tied": {"head_dim": 32},
        "granite": {}, "cohere-tied": {}, "smollm3": {}, "olmo": {},
    }.items()
}  # fmt: skip
USES = (
    "tp=2", "tp=4", "tp=2,style=dtensor", "tp=2 fsdp=2", "tp=2 fsdp=4,wrap=layers", f"tp=4 fsdp=2,{MIXED}", "tp=2 fsdp=3,reshard=no", "tp=2 fsdp=2 ddp=2",
    f"tp=2 fsdp=2,sync=no,{MIXED}", "tp=4 fsdp=8",
)  # fmt: skip
JOBS: tuple[dict[str, Any], ...] = (
    {}, {"checkpointing": "full", "optimizer": "sgd"}, {"precision": "autocast-bf16", "checkpointing": "full", "accumulate": 2},
    {"precision": "fp32", "optimizer": "sgd", "batch": 4}, {"optimizer": "adamw_fused", "clip": 1.0, "seq": 256},
    {"checkpointing": "full", "reentrant": True, "attention": "eager"}, {"precision": "bf16-autocast", "zero_grad": "before_backward"},
)  # fmt: skip
STRIDES = (0, 3, 5)


def cases() -> Iterator[Any]:
    """Every layout meets some of the jobs, the families in turn, the first rank and the last."""
    index = 0
    for place, use in enumerate(USES):
        for stride in STRIDES:
            index += 1
            name, options = tuple(CONFIGS)[index % len(CONFIGS)], JOBS[(place + stride) % len(JOBS)]
            told = " ".join(f"{key}={value}" for key, value in options.items()) or "plain"
            last = index % 2 == 0
            yield pytest.param(
                name,
                use,
                options,
                last,
                id=f"{name} {use} {told} {'last' if last else 'first'}",
                marks=[] if index % 8 == 1 else [pytest.mark.slow],
            )


@pytest.mark.parametrize(("name", "use", "options", "last"), list(cases()))
def test_a_rank(name: str, use: str, options: dict[str, Any], last: bool) -> None:
    from memfit.trace import trace_config

    config, job, strategy = CONFIGS[name], Job(**{"batch": 2, "seq": 128, "clip": 0.0, **options}), strategy_from(use.split(), None)
    strategy = replace(strategy, rank=strategy.ranks - 1 if last else 0)
    traced, written = trace_config(config, job, strategy=strategy), lower(build(config), job, strategy)
    truth, found = memory(traced), memory(written)
    assert abs(found.allocated - truth.allocated) <= 0.005 * truth.allocated, (found.parts, truth.parts)
    held, reserved = replay(written).peak_reserved, replay(traced).peak_reserved
    assert abs(held - reserved) <= max(0.02 * reserved, 4 * 2**20), (held, reserved)


ANSWERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "tp=2", {}), ("llama", "tp=4", {"batch": 8, "seq": 256}), ("llama-tied", "tp=2", {"attention": "eager", "batch": 4}),
    ("llama", "tp=4", {"logits": "all", "new_tokens": 0, "batch": 8}), ("llama-biased", "tp=2", {"cache": "static"}), ("qwen2", "tp=2", {"precision": "fp16"}),
    ("gemma2-tied", "tp=2", {"precision": "fp32"}), ("qwen3", "tp=4", {"batch": 16}), ("granite", "tp=2", {"cache": "none", "new_tokens": 3}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "use", "options"), ANSWERS)
def test_a_rank_that_answers(name: str, use: str, options: dict[str, Any]) -> None:
    from memfit.trace import trace_config

    job = Job(**{"task": "inference", "batch": 2, "seq": 128, "new_tokens": 8, **options})
    strategy = strategy_from(use.split(), None)
    truth, found = memory(trace_config(CONFIGS[name], job, strategy=strategy)), memory(lower(build(CONFIGS[name]), job, strategy))
    assert abs(found.allocated - truth.allocated) <= 0.001 * truth.allocated, (found.parts, truth.parts)


@pytest.mark.parametrize("kind", ["stablelm", "phi3", "gpt_neox"])
def test_families_whose_plan_is_another_are_told(kind: str) -> None:
    with pytest.raises(InputError, match="no formula yet"):
        lower(build({**SMALL, "model_type": kind}), Job(batch=2, seq=128), strategy_from(["tp=2"], None))
