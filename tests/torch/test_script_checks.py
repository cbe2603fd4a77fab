"""Checks in scripts, which stop them: conditions that only a GPU answers, folders and files of
data, lengths of texts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memfit.api.verbs import trace
from memfit.trace import (
    lines,
    missing_pictures,
    pretrained,
    records,
    synthetic_processors,
    trainer_columns,
)
from memfit.trace.asked_columns import MARK, Columns
from memfit.trace.cuda import Device
from memfit.trace.launchers import processes
from memfit.trace.refuse import Watcher
from memfit.trace.synthetic_data import Source, entry

CHECKS = """
import torch

def check(holds, text):
    if not holds:
        raise ValueError(text)

a = torch.randn(4, device="cuda")
b = a.clone()
assert torch.equal(a, b), "copies differ"
assert (a == b).all()
assert not (a < b).any() and (a <= b).all()
assert all(torch.equal(one, other) for one, other in [(a, b)])
if not torch.equal(a, b):
    raise ValueError("copies differ")
if (a < b).any() or not (a <= b).all():
    print("about to stop")
    raise ValueError("copies differ")
seen = [bool((a == b).all())]
if (a == b).all():
    seen.append(True)
assert seen == [False], seen  # where either answer goes on

model = torch.nn.Linear(4, 4).cuda()
model(a).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""
PICTURES = """
import os
import sys
import torch

try:
    from PIL import Image
except ImportError:
    Image = None

found = []
for root, folders, names in os.walk("data/imagenet", topdown=False):
    found += [os.path.join(root, one) for one in names if one.endswith(".jpg")]
assert len(found) > 10000 and len({os.path.dirname(one) for one in found}) == 2
try:
    picture = Image.open(open(found[-1], "rb")) if Image else None
except Exception as bad:
    raise SystemExit(f"no picture: {bad}")
assert picture is None or picture.size == (256, 256)
assert not [*os.walk("output")]
model = torch.nn.Linear(4, 4).cuda()
model(torch.randn(2, 4, device="cuda")).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""
DETECTION = """
import torch
from datasets import load_dataset
from huggingface_hub import HfApi

data = load_dataset("someone/boxes", split="train")
names = data.features["objects"]["category"].feature.names
assert len(names) == 2
row = data[1]
assert isinstance(row["image_id"], int)
assert len(row["objects"]["bbox"]) == len(row["objects"]["category"])
label_column = "label"
ids = {}
for one in data.features[label_column].names:
    ids[one] = len(ids)
print({"label": ids})
pushed = HfApi().upload_folder(repo_id="a/b", folder_path=".", run_as_future=True)
assert pushed.done() and HfApi().upload_folder(repo_id="a/b", folder_path=".") is None
model = torch.nn.Linear(4, 4).cuda()
model(torch.randn(2, 4, device="cuda")).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""
CAPTIONS = """
import torch
from datasets import load_dataset
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

tokenizer = AutoTokenizer.from_pretrained("google-bert/bert-base-uncased")
model = BertForMaskedLM(BertConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2))
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = load_dataset("someone/captions", split="train")
for row in data.select(range(2)):
    batch = tokenizer(row["text"], padding="max_length", return_tensors="pt").to("cuda")
    assert batch["input_ids"].shape == (1, 512), batch["input_ids"].shape
    model(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
assert len(tokenizer(data[0]["text"])["input_ids"]) > 512  # of which a script makes blocks
"""


def test_checks_of_unknown_values_pass(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CHECKS)
    found = trace(script, steps=1)
    assert any("checks of values on the GPU" in one.message for one in found.problems)


def test_a_folder_of_classes_is_walked_through(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PICTURES)
    assert trace(script, steps=1).script is not None


def test_boxes_have_classes_and_uploads_are_done(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DETECTION)
    assert trace(script, steps=1).script is not None


def test_whisper_says_its_languages() -> None:
    def whisper(size: int) -> Any:
        made = SimpleNamespace(
            config=SimpleNamespace(vocab_size=size), generation_config=SimpleNamespace()
        )
        pretrained.multilingual(made)
        return made.generation_config

    assert not whisper(51864).is_multilingual  # whisper-small.en
    small, newest = whisper(51865), whisper(51866)
    assert len(small.lang_to_id) == 99
    assert len(newest.lang_to_id) == 100
    assert small.lang_to_id["<|hi|>"] == 50276
    assert small.task_to_id["transcribe"] == 50359
    assert newest.task_to_id["transcribe"] == 50360


def test_retrievers_of_one_owner_have_the_same_columns() -> None:
    assert entry("zeta-alpha-ai/NanoMSMARCO", "corpus") == "zeta-alpha-ai/*/corpus"
    assert entry("someone/else", "corpus") == ""


def test_texts_are_no_longer_than_what_they_are_padded_to(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CAPTIONS)
    assert trace(script, tokens=600, steps=2).script is not None


def test_a_checkout_of_a_library_is_not_the_library(tmp_path: Path) -> None:
    """`~/src/transformers/examples` has a user's scripts, `transformers/src/transformers` none."""
    package = tmp_path / "transformers" / "src" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert not lines.is_users(str(package / "trainer.py"))
    assert lines.is_users(str(tmp_path / "src" / "transformers" / "examples" / "run_qa.py"))
    checkout = tmp_path / "trl" / "trl"
    checkout.mkdir(parents=True)
    (checkout / "__init__.py").touch()
    assert not lines.is_users(str(checkout / "trainer" / "sft_trainer.py"))
    assert lines.is_users(str(tmp_path / "trl" / "examples" / "sft.py"))


@pytest.mark.parametrize(
    "words",
    [
        ["--num-processes", "8", "train.py"],
        ["--num_processes=8", "train.py"],
        ["launch", "--num-processes=8"],
    ],
)
def test_accelerate_takes_dashes_for_underscores(words: list[str]) -> None:
    assert processes(words) == 8


def test_files_of_classes_have_classes() -> None:
    known = json.loads(records.content("ade20k-id2label.json"))
    assert len(known) == 150
    assert known["0"] == "class 0"
    assert json.loads(records.content("label2id.json"))["class 3"] == 3
    assert json.loads(records.content("imagenet_class_index.json"))["7"][1] == "class 7"
    assert not records.classes("train.json")
    listed = records.Records(["a", "b"])
    assert dict(listed.items()) == {"0": "a", "1": "b"}
    assert listed.keys() == ["0", "1"]


def test_a_folder_that_the_command_names_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = Columns(Source(32, 256, lambda *_: None))
    folders = missing_pictures.Folders(columns)
    command = ["train.py", "--instance_data_dir=dog", "--output_dir", "new", "--data", "cat"]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(missing_pictures, "ending", lambda: ".jpg")
    assert folders.exists("dog")
    assert folders.exists(Path("cat"))
    assert not folders.exists("new")
    assert not folders.exists("other")
    monkeypatch.setattr(missing_pictures, "ending", lambda: "")  # of a script without pictures
    assert not folders.exists("dog")


def test_steps_of_a_solution_are_judged() -> None:
    datasets = pytest.importorskip("datasets")
    columns = Columns(Source(32, 256, lambda *_: None))
    data = datasets.Dataset.from_dict({"text": ["a"] * 3})
    data._info.description = MARK
    kinds = trainer_columns.TRAINERS["experimental.prm.prm_trainer.PRMTrainer"]
    row = trainer_columns.grow(columns, data, kinds)[0]
    assert len(row["completions"]) == len(row["labels"]) == 8
    assert sum(len(one.split()) for one in row["completions"]) == 32
    assert {*row["labels"]} == {True, False}


def test_masks_of_segmentation_are_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = Columns(Source(32, 64, Watcher(Device()).note))
    monkeypatch.setattr(lines, "texts", lambda: [""])
    assert columns.kind("label") == "label 2"
    monkeypatch.setattr(lines, "texts", lambda: ["AutoModelForSemanticSegmentation.from_config"])
    columns.known.clear()
    assert columns.kind("label") == columns.kind("annotation") == "gray"
    monkeypatch.setattr(lines, "texts", lambda: ["AutoModelForUniversalSegmentation"])
    columns.known.clear()
    assert columns.kind("annotation") == "image"


def test_processors_of_masks_know_pixels_without_a_class() -> None:
    kind = type("Mask2FormerImageProcessorFast", (), {})
    assert synthetic_processors.ignoring(kind) == {"ignore_index": 255}
    assert synthetic_processors.ignoring(type("DetrImageProcessor", (), {})) == {}


def test_a_column_of_numbered_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "texts", lambda: [""])
    columns = Columns(Source(32, 64, Watcher(Device()).note))
    assert columns.values("semantic_class_to_id", None)["class 3"] == 3
    assert columns.kind("text_to_image") != "numbered"
