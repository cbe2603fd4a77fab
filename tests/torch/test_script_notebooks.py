"""What notebooks of public courses ask for, each in the few lines that stopped one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import torch
from memfit.api.verbs import trace
from memfit.trace import failures, pretrained, synthetic_data, vision_tokens
from memfit.trace.standins import Params4bit, quantize_4bit

DATA = """
import glob, json, os
from datasets import load_dataset
from google.colab import userdata
import torch
from transformers import AutoTokenizer

os.environ["HUB_SECRET"] = userdata.get("HUB_SECRET")
assert os.environ["HUB_SECRET"] == ""
assert len(glob.glob(pathname="no-such-folder/*.txt")) == 1

data = load_dataset("someone/lines")
lines = data["train"].filter(lambda x: x["predicate"] == "LineComparison")
assert 0 < len(lines) < len(data["train"])

calls = load_dataset("someone/calls", split="train").select(range(4))
for row in calls:
    called = json.loads(row["answers"])
    assert "\\n".join(str(one) for one in called)

train, test = load_dataset("someone/charts", split=["train[:10%]", "test[:10%]"])
assert len(train) == 2000 and len(test) == 200
one = [{"text": sample["label"][0]} for sample in test.select(range(2))]
assert len(one[0]["text"].split()) == 32

tokenizer = AutoTokenizer.from_pretrained("t5-small")

def preprocess(batch):
    inputs = batch["input"]
    targets = batch["target"]
    made = tokenizer(inputs, max_length=16, truncation=True)
    made["labels"] = tokenizer(targets, max_length=8, truncation=True).input_ids
    return made

tags = load_dataset("someone/tags", split="train").select(range(4)).map(preprocess, batched=True)
assert len(tags[0]["labels"]) == 8

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    x = torch.randn(8, 64, device="cuda")
    chosen = (x.view(8, 64) == 0.0).view(2, 256)
    assert chosen.sum(dim=1).tolist() == [256, 256]
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DORA = """
import json
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from peft import LoraConfig, get_peft_model

packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
name = "HuggingFaceTB/SmolLM2-135M"
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=packed, dtype="bfloat16")
assert json.loads(model.config.to_json_string())["quantization_config"]
model = get_peft_model(model, LoraConfig(r=8, use_dora=USED, target_modules=["q_proj"]))
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
for _ in range(2):
    ids = torch.randint(0, 1000, (2, 64), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_columns_and_values_of_notebooks(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(DATA)
    found = trace(script, tokens=64, steps=3)
    assert found.script is not None
    assert found.script.steps == 3


def test_dora_over_4_bit_weights(tmp_path: Path) -> None:
    """PEFT copies the layer, and unpacks the copy (peft 0.21 tuners/lora/dora.py)."""
    trained = {}
    for used in (True, False):
        script = tmp_path / f"dora_{used}.py"
        script.write_text(DORA.replace("USED", str(used)))
        trained[used] = trace(script, steps=2).parameters.trainable
    layers, width = 30, 576
    assert trained[True] - trained[False] == layers * width  # a magnitude for each output


def test_a_copy_of_a_packed_weight_can_be_unpacked() -> None:
    import copy

    packed, state = quantize_4bit(torch.randn(64, 64), nested=False)
    weight = Params4bit(packed, quant_state=state, quant_type="nf4")
    other = copy.deepcopy(weight)
    assert (other.quant_state.shape, other.quant_type) == (state.shape, "nf4")
    assert other.data_ptr() != weight.data_ptr()
    assert other.quant_state.absmax.data_ptr() != state.absmax.data_ptr()


def test_a_picture_s_token_keeps_its_number_among_others() -> None:
    """Idefics 3's processor asks for four; three that the config does not name took the numbers
    around, and the picture's."""

    class Sizes:
        model_type = "idefics3"
        image_token_id = 8

    names = vision_tokens.placed([f"<t{one}>" for one in range(10)], Sizes())
    assert names[8] == "<image>"
    assert len(names) == 10
    assert set(vision_tokens.IDEFICS.values()) <= set(names)


def test_a_package_that_a_late_import_lacks_is_named() -> None:
    words = "Failed to import trl.trainer.sft_trainer because of the following error: No module"
    bad = RuntimeError(f"{words} named 'no_such_package.inner'")
    said = failures.missing_package(bad, "train.py")
    assert said is not None
    assert "needs the package `no_such_package`" in said[0]
    there = RuntimeError(f"{words} named 'json'")
    assert failures.missing_package(there, "train.py") is None


def test_both_ways_to_ask_for_4_bits_are_transformers_error() -> None:
    given: dict[str, Any] = {"load_in_4bit": True, "quantization_config": object()}
    with pytest.raises(ValueError, match="at the same time"):
        pretrained.in_bits(given, old=True)


@pytest.mark.parametrize(
    ("part", "count"), [(":10%", 2000), (":1%", 200), ("90%:", 2000), (":50", 50), ("10:", 1990)]
)
def test_per_cent_are_those_of_a_large_data_set(part: str, count: int) -> None:
    assert len(synthetic_data.part_of(part, 2000)) == count
