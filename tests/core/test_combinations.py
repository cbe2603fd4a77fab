"""Every pair of layouts with every method, and every layout with every technique of a job: an
answer, or a refusal of one sentence."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from types import FrameType
from typing import Any

import pytest

from memfit.errors import InputError, Problem
from memfit.estimate import estimate
from memfit.job import METHODS, Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.model.model import Model
from memfit.optimizers import OPTIMIZERS
from memfit.uses import strategy_from

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
MIXTRAL: dict[str, Any] = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, Model] = {"dense": build(LLAMA), "experts": build(MIXTRAL)}

USES = (
    "ddp=2",
    "ddp=2,bucket-view",
    "ddp=2,distributed",
    "fsdp=2",
    "fsdp=2,version=1",
    "fsdp=2,offload",
    "fsdp=2,version=1,offload",
    "fsdp=2,reshard=no",
    "zero=2,stage=1",
    "zero=2,stage=2",
    "zero=2,stage=3",
    "zero=2,stage=3,offload-optimizer=cpu,offload-param=cpu",
    "zero=2,stage=2,offload-optimizer=cpu",
    "zero=2,stage=3,offload-optimizer=nvme,offload-param=nvme",
    "zero=4,stage=3,hpz=2",
    "zero=2,stage=3,qwz",
    "gemini=2",
    "gemini=2,placement=cpu",
    "tp=2",
    "tp=2,sequence",
    "tp=2,sequence,parallel_loss",
    "cp=2",
    "cp=2,style=allgather",
    "cp=2,style=ulysses",
    "pp=2",
    "pp=2,schedule=gpipe",
    "pp=2,schedule=interleaved,virtual=2",
    "pp=2,schedule=bfs,virtual=2",
    "pp=2,schedule=zero-bubble,virtual=2",
    "pp=2,schedule=zbv,virtual=2",
    "ep=2",
)
TECHNIQUES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"method": "lora"},
    "qlora": {"method": "qlora"},
    "freeze": {"method": "freeze", "trainable": "norm"},
    "int8": {"method": "lora", "quant": "int8"},
    "checkpoints": {"checkpointing": "full"},
    "reentrant": {"checkpointing": "full", "reentrant": True},
    "every": {"checkpointing": "every", "checkpoint_every": 2},
    "selective": {"checkpointing": "selective"},
    "qlora checkpoints": {"method": "qlora", "checkpointing": "full"},
    "autocast": {"precision": "autocast-bf16"},
    "fp16": {"precision": "autocast-fp16"},
    "masters": {"precision": "bf16-master"},
    "liger's loss": {"loss": "liger"},
    "liger": {"liger": True},
    "accumulate": {"accumulate": 2},
    "evaluate": {"evaluate": True},
    "8 bits": {"optimizer": "adamw_8bit"},
    "eager": {"attention": "eager"},
    "padded": {"packing": False},
    "flash": {"attention": "flash-attn-2"},
    "outputs": {"keep_outputs": True},
    "long": {"longest": 64},
}
FRAMEWORKS = ("transformers", "trl", "torchtitan", "torchtune", "litgpt", "megatron")


LONGEST = 250  # of a sentence, characters
ANSWERED = {"pairs": 120, "frameworks": 140, "techniques": 250}  # fewer would be answers lost


def asked(use: str, model: str, options: dict[str, Any]) -> str:
    """What comes of it: nothing is said where there is an answer."""
    problems: tuple[Problem, ...] = ()
    try:
        job = Job(**{"batch": 1, "seq": 32, "optimizer": "adamw", **options})
        assert len(lower(MODELS[model], job, strategy_from(use.split(), None), compact=True)) > 0
    except InputError as refused:
        problems = refused.problems or (Problem(message=""),)
    for one in problems:
        assert 0 < len(one.message) < LONGEST, one
        assert one.message == one.message.strip().rstrip("."), one
        assert "\n" not in one.message, one
    return " | ".join(one.message for one in problems)


def paired() -> Iterator[tuple[str, str]]:
    for first, second in combinations(USES, 2):
        if first.partition("=")[0] != second.partition("=")[0]:
            yield f"{first} {second}", "experts" if "ep=" in second else "dense"


def sole() -> Iterator[tuple[str, str]]:
    yield from ((use, "experts" if use.startswith("ep=") else "dense") for use in USES)


def test_pairs_with_every_method() -> None:
    found = {
        (use, name): asked(use, model, TECHNIQUES[name])
        for use, model in paired()
        for name in METHODS
    }
    assert sum(not said for said in found.values()) >= ANSWERED["pairs"]


def test_pairs_under_every_framework() -> None:
    found = {
        (use, one): asked(use, model, {"framework": one})
        for use, model in paired()
        for one in FRAMEWORKS
    }
    assert sum(not said for said in found.values()) >= ANSWERED["frameworks"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layouts_with_every_technique(framework: str) -> None:
    found = {
        (use, name): asked(use, model, {"framework": framework, **options})
        for use, model in sole()
        for name, options in TECHNIQUES.items()
    }
    assert (
        framework != "transformers"
        or sum(not said for said in found.values()) >= ANSWERED["techniques"]
    )


def test_every_optimizer_under_every_layout() -> None:
    """GaLore's and APOLLO's steps need matrices: where a shard lies flat they are refused."""
    for use in (
        "ddp=2",
        "fsdp=2",
        "fsdp=2,version=1",
        "fsdp=2,offload",
        "zero=2,stage=1",
        "zero=2,stage=3",
        "gemini=2",
        "tp=2",
        "pp=2,schedule=zbv,virtual=2",
    ):
        said = {name: asked(use, "dense", {"optimizer": name}) for name in OPTIMIZERS}
        assert all(said[name] for name in ("galore_adamw", "apollo_adamw")) or use.partition("=")[
            0
        ] not in ("zero", "fsdp"), use


# --------------------------------------------------------------------------------------------------
# scale
# 8 GPUs, 10,000 of them, and how many times the work those may be
SCALES: tuple[tuple[str, str, float, dict[str, Any]], ...] = (
    ("ddp=8", "ddp=10000", 1.01, {}),
    ("fsdp=8", "fsdp=10000", 1.01, {}),
    ("fsdp=8,version=1", "fsdp=10000,version=1", 1.01, {}),
    ("fsdp=4 ddp=2", "fsdp=8 ddp=1250", 1.01, {}),
    ("zero=8,stage=3", "zero=10000,stage=3", 1.01, {}),
    ("tp=2 fsdp=4", "tp=4 fsdp=2500", 1.01, {}),
    ("pp=2 fsdp=4", "pp=2 fsdp=5000", 1.01, {}),
    ("cp=2 fsdp=4", "cp=2 fsdp=5000", 1.01, {"seq": 64}),
    (
        "tp=2,sequence pp=2 ddp=2,distributed",
        "tp=2,sequence pp=2 ddp=2500,distributed",
        1.01,
        {
            "framework": "megatron",
            "task": "pretrain",
            "precision": "bf16-master",
            "optimizer": "adam_fused",
        },
    ),
    ("zero=8,stage=1", "zero=10000,stage=1", 6.0, {}),
    ("zero=8,stage=2", "zero=10000,stage=2", 6.0, {}),  # the worst of 10,000 partitions is sought
)


def calls(ask: Callable[[], object]) -> int:
    """Python functions that are called: work that no other process on the machine changes."""
    count = 0

    def seen(_frame: FrameType, event: str, _given: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()  # earlier tests' garbage would be counted where it is collected
    gc.disable()
    sys.setprofile(seen)
    try:
        ask()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize(
    ("few", "many", "times", "options"), SCALES, ids=[many for _, many, _, _ in SCALES]
)
def test_ten_thousand_ranks_are_as_quick_as_eight(
    few: str, many: str, times: float, options: dict[str, Any]
) -> None:
    def work(use: str) -> int:
        strategy = strategy_from(use.split(), None)
        job = Job(**{"batch": 1, "seq": 32, **options})
        estimate(
            MODELS["dense"], job, None, strategy, precise=False
        )  # once, for what is remembered
        return calls(lambda: estimate(MODELS["dense"], job, None, strategy, precise=False))

    assert work(many) <= times * work(few)
