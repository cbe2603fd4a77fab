"""Scripts that generate, and what their tokenizers and trainers lack."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memfit.api.verbs import trace
from memfit.trace import failures, flash_attn, flash_older, missing_packages

GENERATES = """
import sys, torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

class Own(DynamicCache):
    pass

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                     num_attention_heads=4, vocab_size=500)
model = LlamaForCausalLM(config).cuda().half()
ids = torch.randint(0, 500, (64, 4), device="cuda")
given = {"past_key_values": Own(config=config)} if sys.argv[1:] else {}
out = model.generate(ids, max_new_tokens=60, eos_token_id=None, pad_token_id=0, **given)
assert out.shape == (64, 64)
"""


def test_tokens_in_the_middle_are_not_run(tmp_path: Path) -> None:
    script = tmp_path / "generate.py"
    script.write_text(GENERATES)
    short, whole = trace(script, steps=0), trace(script, "whole", steps=0)
    # Python's collector frees a few small tensors at other times
    assert short.memory.allocated == pytest.approx(whole.memory.allocated, rel=0.01)
    assert short.memory.reserved == whole.memory.reserved
    said = [one.message for one in short.problems if "are not run" in one.message]
    assert said == ["54 passes without gradients that allocate like those before them are not run"]
    assert not [one for one in whole.problems if "are not run" in one.message]


LACKING = """
import os
from datasets import Dataset
from transformers import AutoTokenizer, TrainingArguments, Trainer
import torch

tokenizer = AutoTokenizer.from_pretrained("meta-llama/Llama-2-7b-hf")
assert tokenizer.pad_token is None
data = Dataset.from_dict({"text": ["a few words"] * 8})

def encode(row):
    assert os.getpid() == here
    found = tokenizer(row["text"], padding="max_length", max_length=16)
    return {"x": [float(one) for one in found["input_ids"]]}

here = os.getpid()
data = data.map(encode, num_proc=4, remove_columns=["text"])
assert tokenizer.pad_token_id is not None

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 1)
    def forward(self, x):
        return {"loss": self.linear(x).square().mean()}

settings = TrainingArguments("out", report_to=["wandb"], max_steps=2, remove_unused_columns=False)
Trainer(Model(), settings, train_dataset=data).train()
"""


def test_a_tokenizer_pads_and_a_trainer_reports(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LACKING)
    found = trace(script, steps=2)
    said = "\n".join(one.message for one in found.problems)
    assert "the tokenizer of `meta-llama/Llama-2-7b-hf` is assumed to pad with `</s>`" in said
    assert missing_packages.installed("wandb") or "`wandb` is not installed" in said


class Notes:
    def __init__(self) -> None:
        self.notes: dict[str, str] = {}

    def note(self, kind: str, message: str) -> None:
        self.notes[kind] = message


class Chooser:
    """A class of models before transformers 4.56."""

    @classmethod
    def _autoset_attn_implementation(cls, config: Any, **_: Any) -> Any:
        return config


@pytest.mark.parametrize("given", [{}, {"use_flash_attention_2": True}])
def test_older_models_ask_for_flash_attn(
    given: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[Any] = []
    monkeypatch.setattr(
        flash_older, "installed", lambda one: contextlib.nullcontext(entered.append(one))
    )
    notes = cast("Any", Notes())
    ((_, _, chosen),) = flash_attn.older_in_scripts(Chooser, notes)
    for kind, flags in (("sdpa", given), ("flash_attention_2", {})):
        config = SimpleNamespace(_attn_implementation=kind)
        assert chosen.__func__(Chooser, config, **flags) is config
        if kind == "sdpa":
            assert bool(entered) == bool(given)
    assert len(entered) == 1  # once for all models
    assert "flash-attn" in notes.notes


def test_a_reason_on_the_next_line_is_said() -> None:
    assert failures.first_line(ValueError("it failed because:\n\n numpy is old \nmore")) == (
        "it failed because: numpy is old"
    )
    assert failures.first_line(ValueError("one.\ntwo")) == "one"


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_goes_by_either_name(name: str) -> None:
    from transformers import DynamicCache

    import torch
    from memfit.trace.generation import Generation

    stopping_criteria = [SimpleNamespace(max_length=40)]  # where the loop's length is looked up
    cache, runs = DynamicCache(), []
    cache.update(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4), 0)
    generation = Generation()

    def call() -> dict[str, object]:
        runs.append(cache.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), 0))
        return {"logits": torch.zeros(1, 1, 16), name: cache}

    given = {name: cache, "use_cache": True, "input_ids": torch.ones(1, 1, dtype=torch.long)}
    found = [generation.step(call, given)[0] for _ in range(10)]
    assert found == [False] * 3 + [True] * 7
    assert len(runs) == 3
    assert cache.get_seq_length() == 18
    assert len(stopping_criteria) == 1


UNCACHED = """
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M", device_map="cuda")
if HOOKED:
    model.register_forward_hook(lambda *_: None)  # whose module is always run
ids = torch.randint(0, 1000, (2, 32), device="cuda")
with torch.no_grad():
    found = model.generate(ids, max_new_tokens=16, use_cache=False, do_sample=True)
assert found.shape == (2, 48)
"""


def test_tokens_without_a_cache_are_skipped(tmp_path: Path) -> None:
    """The last passes are the largest, and are run."""
    script = tmp_path / "generate.py"
    found = []
    for hooked in (False, True):
        script.write_text(UNCACHED.replace("HOOKED", str(hooked)))
        found.append(trace(script, steps=0))
    skipping, whole = found
    # Python's collector frees a few small tensors at other times
    assert skipping.memory.allocated == pytest.approx(whole.memory.allocated, rel=0.001)
    assert skipping.memory.reserved == whole.memory.reserved
    assert any("10 passes without gradients" in one.message for one in skipping.problems)
