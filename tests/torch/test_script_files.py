"""Local files that a script opens and that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.api.verbs import trace
from memfit.errors import InputError
from memfit.trace import pretrained
from memfit.trace.missing_files import ARRAYS, stands_for_data
from memfit.trace.synthetic_downloads import JSON, TEXTS

STEP = """
import torch
torch.nn.Linear(64, 64).cuda()(torch.ones(8, 64).cuda()).sum().backward()
"""
READS = """
import json, os
from glob import glob
from pathlib import Path
import numpy as np
import pandas as pd
from datasets import load_dataset

with open("data/input.txt", encoding="utf-8") as file:
    text = file.read()
assert len(text.split()) > 100_000
assert Path("corpus.txt").read_text() == text
assert json.load(open("alpaca_data.json"))[3]["instruction"].split()
assert all(json.loads(one)["answer"] for one in open(os.path.join("data", "train.jsonl"), "rb"))

tokens = np.memmap(os.path.join("openwebtext", "train.bin"), dtype=np.uint16, mode="r")
assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16 and len(tokens) == 1 << 20
assert int(tokens.max()) < 64 and np.fromfile("val.bin", dtype=np.uint16).max() < 64
np.arange(8, dtype=np.uint16).tofile("mine.bin")
assert list(np.memmap("mine.bin", np.uint16, "r", 4, (2,))) == [2, 3]

shards = sorted(glob(os.path.join("data", "all_data", "*.bin")))
assert len(shards[1:]) == 3 and len(np.memmap(shards[2], dtype=np.uint16, mode="r")) == 1 << 20
files = [str(one) for one in Path("corpora/pretrain").glob("*.txt")]
assert glob("corpora/tuning/*.json")
texts = load_dataset("text", data_files=files)["train"]
assert len(texts) == 2000 and texts.column_names == ["text"]
classes = "num_labels"  # of which a file of texts has none
features = load_dataset("someone/strange", split="train").features
assert "utterance" in features.keys() and "reply" in features
captions = pd.read_csv("captions.csv")
assert captions["id"].isin(np.arange(0, captions["id"].max() + 1)).all()
"""


def test_files_of_data_have_stand_ins(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(READS + STEP)
    found = trace(script, steps=0)
    said = "\n".join(one.message for one in found.problems)
    for name in ("data/input.txt", "alpaca_data.json", "train.bin", "corpora/pretrain"):
        assert f"{name}` was not found" in said
    assert not [*tmp_path.glob("*.txt"), *tmp_path.glob("*.bin")]


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("input.txt", True),
        ("data/e2e/train.jsonl", True),
        ("openwebtext/train.bin", True),
        ("vocab.json", False),
        ("data/config.json", False),
        ("labels.txt", False),
        ("out/train.txt", False),
        ("runs/last/results.json", False),
        ("train.py", False),
        ("model.safetensors", False),
        ("site-packages/typer-0.29.2.dist-info/top_level.txt", False),
    ],
)
def test_only_data_is_made_up(path: str, data: bool) -> None:
    assert stands_for_data(path, (*TEXTS, *JSON, *ARRAYS)) == data


def test_a_file_that_the_script_can_do_without_is_not_there(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    reads = "try:\n    open('train.txt')\n    assert False\nexcept FileNotFoundError:\n    pass\n"
    script.write_text(reads + STEP)
    assert trace(script, steps=0).memory.allocated


def test_an_assertion_about_a_path_names_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    asserts = "import os\nfolder = 'shards'\nassert os.path.exists(os.path.join(folder, 'a.bin'))\n"
    script.write_text(asserts + STEP)
    with pytest.raises(InputError, match=r"asserts that `shards/a\.bin` exists"):
        trace(script)


def test_auto_leaves_the_config_its_dtype(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "torch_dtype": "bfloat16"}')
    given = {"torch_dtype": "auto"}
    config, rest = pretrained.config_of(transformers.LlamaForCausalLM, str(tmp_path), given)
    assert pretrained.dtype_of(rest, config, quantized=True) == torch.bfloat16
