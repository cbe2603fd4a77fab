"""Models and packages that are not there, and what takes their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.api.verbs import trace
from memfit.errors import InputError
from memfit.trace.pretrained import original

FLASH = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
name = "someone/Qwen2.5-0.5B-Instruct"
config = AutoConfig.from_pretrained(name, num_hidden_layers=1)
for asked in ("flash_attention_2", "kernels-community/flash-attn3"):
    model = AutoModelForCausalLM.from_pretrained(
        name, config=config, dtype=torch.bfloat16, attn_implementation=asked).cuda()
    assert model.config._attn_implementation.startswith("flash_attention")
    optimizer = torch.optim.SGD(model.parameters())
    ids = torch.randint(0, 1000, (2, 512), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, 100:] = 0
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    optimizer.step()
"""
STOPPED = """
from datasets import load_dataset
float(load_dataset("someone/strange", split="train")[0]["story"])
"""


def test_flash_attention_needs_no_package(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FLASH)
    found = trace(script, steps=2)
    said = "\n".join(one.message for one in found.problems)
    assert "flash-attn is not installed" in said
    assert "assumed to have the sizes of `Qwen/Qwen2.5-0.5B-Instruct`" in said


def test_an_error_comes_with_what_was_assumed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STOPPED)
    with pytest.raises(InputError, match="could not convert") as caught:
        trace(script)
    notes = [one.message for one in caught.value.problems if one.level == "note"]
    assert any("`someone/strange` is not there" in one for one in notes)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("someone/SmolLM-135M-Instruct", "HuggingFaceTB/SmolLM-135M"),
        ("someone/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-chat-hf"),
        ("someone/Qwen3-4B-unsloth-bnb-4bit", "Qwen/Qwen3-4B"),
        ("someone/strange-it", ""),
    ],
)
def test_names_of_tuned_models(name: str, known: str) -> None:
    found = original(name)
    assert (found[0] if found else "") == known
