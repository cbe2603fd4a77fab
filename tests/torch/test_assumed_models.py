"""Models that nothing is known of but their name."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.api.verbs import trace
from memfit.errors import InputError
from memfit.trace import assumed_models, pretrained


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("someone/Qwen2.5-Math-7B-long", "Qwen/Qwen2.5-Math-7B"),
        ("someone/Llama3-8b-med", "meta-llama/Meta-Llama-3-8B"),
        ("path_to/llama-2-7b-tuned", "meta-llama/Llama-2-7b-hf"),
        ("someone/strange-65b", "70B"),
        ("someone/strange-Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1"),
        ("someone/news-roberta-base-sentiment", "`roberta-base`"),
        ("someone/whisper-small-hi", "`whisper-small`"),
        ("someone/bert-base-mean-tokens", "`bert-base`"),
    ],
)
def test_a_name_says_which_sizes(name: str, known: str) -> None:
    found = assumed_models.find(name)
    assert found is not None
    assert known in found[1]
    assert found[0]["vocab_size"]


@pytest.mark.parametrize(
    "name",
    [
        "someone/strange",
        "someone/strange-200b",
        "someone/Qwen2.5-7B-Instruct-AWQ",
        "someone/Qwen-VL-7B",
        "someone/whisper-1b",
        "someone/strange-8x7b",
        "someone/roberta-base-lora",
    ],
)
def test_a_name_that_says_too_little(name: str) -> None:
    assert assumed_models.find(name) is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/root/autodl-tmp/Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("autodl-tmp/models/Qwen3-8B/", "Qwen3-8B"),
        ("~/models/Qwen/Qwen3-0___6B", "Qwen/Qwen3-0.6B"),
        ("../llama-2-7b-tuned", "llama-2-7b-tuned"),
        ("hub/models--Qwen--Qwen3-8B/snapshots/1a2b", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("gpt2", "gpt2"),
    ],
)
def test_a_folder_is_called_after_its_model(path: str, name: str) -> None:
    assert assumed_models.published(path) == name


FOLDERS = """
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("/models/HuggingFaceTB/SmolLM2-135M")
assert len(tokenizer) == 49152
kept = AutoModelForCausalLM.from_pretrained("./models/SmolLM2-135M", device_map="cuda")
assert kept.config.hidden_size == 576
AutoModelForCausalLM.from_pretrained("./models/of-mine")
"""


def test_folders_of_models_that_are_not_there(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FOLDERS)
    with pytest.raises(InputError, match=r"folder `\./models/of-mine`, which was not") as caught:
        trace(script)
    said = [one.message for one in caught.value.problems if "config" in one.message]
    assert len(said) == 2
    assert "`HuggingFaceTB/SmolLM2-135M` takes its place" in said[0]


RUN = """
import torch
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

data = load_dataset("someone/files", split="train")
assert all(data[0][key][:200] for key in data[0])  # texts alone
assert load_dataset("someone/more", split="train")[0]["similarity_score"] == 0.0
tokenizer = AutoTokenizer.from_pretrained("someone/words-tokenizer")
config = AutoConfig.from_pretrained("someone/SmolLM2-135M-of-mine")
config.num_hidden_layers = 1
model = AutoModelForCausalLM.from_config(config).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    rows = tokenizer(data[0]["text"], return_tensors="pt")["input_ids"][:, :32].cuda()
    model(rows, labels=rows).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_with_such_names(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RUN)
    found = trace(script, tokens=32)
    assert found.script is not None
    notes = " ".join(one.message for one in found.problems)
    assert "by its name it is assumed to have the sizes of `HuggingFaceTB/SmolLM2-135M" in notes
    assert "GPT-2's 50,257 tokens" in notes


def test_qwen3_vl_before_transformers_5(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "qwen3_vl", "text_config": {"rope_theta": 5000000}}
    monkeypatch.setattr(pretrained, "TRANSFORMERS", (5, 0))
    assert pretrained.rotary(config) == {}
    monkeypatch.setattr(pretrained, "TRANSFORMERS", (4, 57))
    text = pretrained.rotary(config)["text_config"]
    assert text["rope_scaling"]["mrope_section"] == [24, 20, 20]
    assert text["rope_theta"] == 5000000
    assert pretrained.rotary({"model_type": "qwen3"}) == {}
