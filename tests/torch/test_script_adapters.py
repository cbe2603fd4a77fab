"""Adapters of PEFT's that a script loads and that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.api.verbs import trace
from memfit.trace.missing_adapters import rank_of

LOADS = """
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

def base():
    return AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M", device_map="cuda")

def ranks(model):
    return {one.r for one in model.peft_config.values()}

model = PeftModel.from_pretrained(base(), "someone/smollm-r32-tuned", is_trainable=True)
assert ranks(model) == {32}
assert any(one.requires_grad for one in model.parameters())
assert PeftConfig.from_pretrained("someone/other").r == 16

own = get_peft_model(base(), LoraConfig(r=4, target_modules=["v_proj"]))
own.save_pretrained("out")
again = PeftModel.from_pretrained(base(), "out")
assert ranks(again) == {4}
assert sum("lora_A" in name for name, _ in again.named_parameters()) == 30
again.merge_and_unload()

optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
for _ in range(2):
    ids = torch.randint(0, 1000, (2, 64), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_adapter_that_is_not_there(tmp_path: Path) -> None:
    """One that the script has saved has its own settings."""
    script = tmp_path / "train.py"
    script.write_text(LOADS)
    found = trace(script, steps=0)
    said = [one.message for one in found.problems if one.message.startswith("the adapter")]
    assert len(said) == 2
    assert "LoRA of rank 32 on all linear layers" in said[0]
    # 9,768,960 by hand: 30 layers, rank 32, 7 projections of 576, 192 and 1,536
    assert found.parameters.trainable >= 9_768_960


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("fxmeng/pissa-llama-2-7b-r16-alpha-16", 16),
        ("LoftQ/Llama-2-13b-hf-4bit-64rank", 64),
        ("someone/rank_8", 8),
        ("someone/r1-distilled-lora", 16),
        ("someone/tuned", 16),
    ],
)
def test_the_rank_that_a_name_says(name: str, rank: int) -> None:
    assert rank_of(name) == rank
