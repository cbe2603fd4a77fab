"""Steps of transformers' Trainer that add up many batches, in a traced script."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import torch
from memfit.api.verbs import trace
from memfit.trace.micro_batches import largest, shaped_by, size

TRAINS = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, place):
        ids = torch.zeros(32 + place * 37 % 96, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

class Whole(Trainer):  # reads the batches itself, so all of them are run
    def get_batch_samples(self, *args):
        return super().get_batch_samples(*args)

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                     num_attention_heads=4, vocab_size=500)
settings = TrainingArguments("out", per_device_train_batch_size=1, gradient_accumulation_steps=8,
                             max_steps=3, report_to="none")
kind = Whole if sys.argv[1:] else Trainer
trainer = kind(LlamaForCausalLM(config), settings, train_dataset=Rows())
trainer.train()
assert trainer.state.global_step == 3
assert settings.gradient_accumulation_steps == 8
"""


def test_the_largest_batches_of_a_step_are_run_alone(tmp_path: Path) -> None:
    """The same peaks byte for byte, also those of the allocator."""
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    few, whole = trace(script, steps=0), trace(script, "whole", steps=0)
    assert few.memory.allocated == whole.memory.allocated
    assert few.memory.reserved == whole.memory.reserved
    said = [one.message for one in few.problems if "batches of a step" in one.message]
    assert len(said) == 1
    assert said[0].startswith("of the 8 batches of a step the first and the 2 largest others are")
    assert not [one for one in whole.problems if "batches of a step" in one.message]


def test_the_first_batch_and_the_largest_others_in_their_order() -> None:
    def batch(length: int) -> dict[str, Any]:
        return {"x": torch.zeros(length), "more": [torch.zeros(1, length)], "number": 7}

    batches = [batch(length) for length in (1, 5, 9, 2, 9, 3)]
    assert [size(one) for one in batches] == [2, 10, 18, 4, 18, 6]
    assert [size(one) for one in largest(batches)] == [2, 18, 18]
    assert [size(one) for one in largest(batches[:2])] == [2, 10]
    assert largest([]) == []


@pytest.mark.parametrize(
    ("trainer", "told"),
    [
        (SimpleNamespace(args=SimpleNamespace()), False),
        (SimpleNamespace(args=SimpleNamespace(), is_deepspeed_enabled=True), True),
        (SimpleNamespace(args=SimpleNamespace(steps_per_generation=8)), True),  # GRPO
    ],
)
def test_where_the_number_of_batches_decides_all_are_run(trainer: Any, told: bool) -> None:
    assert shaped_by(trainer) is told
