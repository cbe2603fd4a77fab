"""Over every option of a job: each choice, and values at the ends of each range, give an answer
that adds up or are refused in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any

import pytest
from tests.sampling import WHOLE, sampled

import memfit
from memfit.job import Job
from memfit.optimizers import OPTIMIZERS

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
EXPERTS = {**SMALL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
JOBS: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "evaluate": True},
    "lora": {"method": "lora", "merge": True},
    "qlora": {"method": "qlora"},
    "int8": {"method": "lora", "quant": "int8"},
    "freeze": {"method": "freeze", "trainable": "layers.1."},
    "pretrain": {"task": "pretrain"},
    "inference": {"task": "inference", "new_tokens": 40},
    "nf4": {"task": "inference", "quant": "nf4", "new_tokens": 3},
}
# What formulas refuse is traced, which takes seconds: for these jobs alone, all with MEMFIT_WHOLE.
TRACED = tuple(JOBS) if WHOLE else ("lora", "inference")
# Of scores of 2^20 x 2^20 nothing fits, and looking for what would takes a minute.
LARGEST = {"longest": 2**14}
TEXTS = {
    "optimizer": tuple(OPTIMIZERS),
    "targets": ("all-linear", "q_proj,v_proj", ""),
    "modules_to_save": ("lm_head", "embed_tokens", "norm"),
    "recompute_modules": ("mlp", "core_attn,moe_act", "mla_up_proj"),
    "unsloth": ("2025.11.1",),
    "trainable": ("lm_head", "self_attn", ""),
    "quant_skip": ("q_proj", "lm_head"),
    "versions": (
        "transformers=4.36,torch=2.1,peft=0.7,bitsandbytes=0.41",
        "transformers=4.46",
        "transformers=5.0",
        "torch=2.4",
    ),
    "alloc_conf": (
        "expandable_segments:True",
        "max_split_size_mb:64",
        "garbage_collection_threshold:0.5",
        "roundup_power2_divisions:4",
    ),
}


def values(one: Field[Any]) -> Iterator[Any]:
    """Values of an option that its own description allows."""
    if one.type == "bool":
        yield not one.default
    elif one.metadata["choices"]:
        yield from (choice for choice in one.metadata["choices"] if choice != one.default)
    elif one.type in ("int", "float"):
        yield from (
            one.metadata["low"],
            3 if one.type == "int" else 1.5,
            min(one.metadata["high"], LARGEST.get(one.name, 2**20)),
        )
    else:
        yield from TEXTS[one.name]


CASES = [
    (one.name, value)
    for one in fields(Job)
    if one.name not in ("task", "method")
    for value in values(one)
]


ASKED = [(kind, config) for kind in JOBS for config in (SMALL, EXPERTS)]


@pytest.mark.parametrize(
    ("number", "name", "value"),
    [(number, *case) for number, case in enumerate(CASES)],
    ids=[f"{name}={str(value)[:20]}" for name, value in CASES],
)
def test_every_value_answers_or_is_refused(number: int, name: str, value: Any) -> None:
    """Every third pair of job and model, others for the next value; all with MEMFIT_WHOLE."""
    for kind, config in sampled(ASKED, 3, number):
        by = "auto" if kind in TRACED else "formula"
        job = {"seq": 24, "by": by, **JOBS[kind], name: value}
        try:
            found = memfit.estimate(config, gpu="rtx-4090", **job)
        except memfit.InputError as refused:
            assert refused.problems, kind
            assert all(problem.message for problem in refused.problems), kind
            continue
        assert sum(found.parts.values()) == found.device, kind
        assert min(found.parts.values()) >= 0, kind
        assert found.band.low <= found.device <= found.band.high, kind
        assert found.memory.reserved is not None, kind
        assert found.memory.reserved >= found.memory.allocated, kind
        assert found.memory.parts["weights"] > 0, kind
        stretches = found.memory.timeline
        assert max(stretch.allocated for stretch in stretches) == found.memory.allocated, kind
