"""Composites asked as text: their language model's own class where transformers has one, with the
parameters and the peak of that class."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from tests.sampling import WHOLE

import torch
from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build, find
from memfit.model.heads import with_head
from memfit.model.model import Model
from memfit.simulate.memory import memory
from memfit.tape import check as legal
from memfit.trace import classes, trace_config

HEAD = "causal-lm"
WORST = 0.005  # of the peak that the trace has
CLASSES = {
    "gemma4": "Gemma4ForConditionalGeneration",
    "llama4": "Llama4ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mllama": "MllamaForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}
# A case for each in turn, all with MEMFIT_WHOLE.
CASES: tuple[dict[str, Any], ...] = (
    {"batch": 5, "seq": 96, "packing": False},
    {"batch": 4, "seq": 72, "method": "lora"},
    {"batch": 3, "seq": 120, "precision": "autocast-bf16", "checkpointing": "full"},
    {"batch": 2, "seq": 96, "task": "inference", "new_tokens": 4},
)


def config_of(kind: str, example: int = 0) -> dict[str, Any]:
    return {**find(kind).examples[example], "model_type": kind, "dtype": "bfloat16"}


def text_of(config: dict[str, Any]) -> Model:
    return with_head(build(config), HEAD, 0)


@pytest.mark.parametrize("kind", CLASSES)
def test_parameters_are_those_of_the_class(kind: str) -> None:
    for example in range(len(find(kind).examples)):
        config = config_of(kind, example)
        own = transformers.AutoConfig.for_model(**config)
        with torch.device("meta"):
            theirs = classes.builder(HEAD, own).from_config(own)
        assert type(theirs).__name__ == CLASSES[kind]
        expected = {name: tuple(one.shape) for name, one in theirs.named_parameters()}
        assert {one.name: one.shape for one in text_of(config).weights()} == expected


@pytest.mark.parametrize("kind", CLASSES)
def test_peaks_are_those_of_the_trace(kind: str) -> None:
    config = config_of(kind)
    turn = list(CLASSES).index(kind) % len(CASES)
    for case in CASES if WHOLE else [CASES[turn]]:
        job = Job(**{"optimizer": "adamw_fused", "head": HEAD, **case})
        tape = lower(text_of(config), job)
        legal(tape)
        off = memory(tape).allocated / memory(trace_config(config, job)).allocated - 1
        assert abs(off) <= WORST, f"{off:+.2%} {case}"


@pytest.mark.parametrize("kind", ["llama4", "mllama"])
def test_trl_fails_where_the_formula_says_so(kind: str) -> None:
    config = config_of(kind)
    job = Job(head=HEAD, framework="trl", seq=64)
    for answer in (lambda: trace_config(config, job), lambda: estimate(text_of(config), job)):
        with pytest.raises(InputError, match="whose `base_model` is itself"):
            answer()
