"""Pictures and recordings that are not there: folders, tables, downloads."""

from __future__ import annotations

import io
import tarfile
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

import torch
from memfit.errors import InputError
from memfit.trace import (
    asked_columns,
    lines,
    near_files,
    public_configs,
    savers,
    synthetic_downloads,
    synthetic_tokenizers,
)

READER = "def imread(path, flags=1):\n    return None\n"
FOLDERS = """
import cv2, glob, os
from pathlib import Path
import pandas as pd

names = sorted(os.listdir("data/train/images"))
assert len(names) == 256 and names[0] == "000000.jpg"
assert os.path.isfile("data/train/images/" + names[3])
assert cv2.imread("data/train/images/" + names[0]).shape == (256, 256, 3)
assert cv2.imread("data/train/masks/" + names[0], 0).shape == (256, 256)
assert len(glob.glob("faces/*.jpg")) == len(glob.glob("two/*/*.jpg")) == 256
assert len(list(glob.iglob("faces/*.*"))) == len(list(Path("flowers").rglob("*.tif"))) == 256
assert not glob.glob("checkpoints/*.png") and not glob.glob("faces/*.pt")
assert not list(Path("runs").glob("*.png"))
for folder in ("output", "annotations"):  # its own, and one of ".xml"
    try:
        os.listdir(folder)
    except FileNotFoundError:
        continue
    raise SystemExit(folder)
try:
    os.listdir("cache of mine")
except OSError:
    pass
classes = os.listdir("classes")
assert len(os.listdir(os.path.join("classes", classes[0]))) == 16
table = pd.read_csv("train.csv")
row = table.iloc[3]
assert table["image_id"][5] == "000005.jpg" and row["audio"] == "000003.wav"
assert cv2.imread("train/" + row["image_id"]) is not None
assert cv2.imread("train/notes.pdf") is None
"""


def test_a_misspelled_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "train_images").mkdir()
    with pytest.raises(InputError, match="was not found") as bad:
        near_files.refuse_misspelled_folder(str(tmp_path / "train_image"))
    assert "train_images" in str(bad.value.problems[0].hint)
    near_files.refuse_misspelled_folder(str(tmp_path / "faces"))


def test_downloaded_archives_are_empty() -> None:
    assert (
        zipfile.ZipFile(io.BytesIO(synthetic_downloads.content("http://x/a.zip"))).namelist() == []
    )
    packed = io.BytesIO(synthetic_downloads.content("http://x/a.tar.gz?v=1"))
    with tarfile.open(fileobj=packed) as files:
        assert files.getnames() == []
    assert synthetic_downloads.is_known("https://huggingface.co/a/b/cat.png")
    assert not synthetic_downloads.is_known("https://huggingface.co/a/b/data.zip")


def test_a_column_takes_the_name_of_one_that_nobody_asked_for() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"label": [1], "intent": [2]})
    data._info.description = asked_columns.MARK
    renamed = asked_columns.renaming(datasets.Dataset.rename_column)
    assert renamed(data, "intent", "label")["label"][:] == [2]


def test_columns_that_have_names_are_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'labels = data["train"].features["intent_class"].names'
    monkeypatch.setattr(lines, "texts", lambda: iter([text]))
    assert asked_columns.kind_said("intent_class") == "label 16"
    assert asked_columns.kind_said("intent") == "label 2"
    assert asked_columns.kind_said("intents") == "text"
    assert asked_columns.kind_said("objects") == "objects"


def test_a_drawing_of_a_model_runs_it_once() -> None:
    kind: Any = type("SummaryWriter", (), {})
    [(_, name, add_graph)] = savers.graphs(types.SimpleNamespace(SummaryWriter=kind))  # type: ignore[arg-type]
    ran: list[Any] = []
    for given in (torch.ones(2), (1, 2), None):
        add_graph(kind(), lambda *args: ran.append(args), given)
    assert name == "add_graph"
    assert [len(one) for one in ran] == [1, 2, 0]


def test_a_tokenizer_without_its_files_is_empty() -> None:
    class Half:
        def __len__(self) -> int:
            return int(self.total)  # type: ignore[attr-defined]

    assert synthetic_tokenizers.entries(Half()) == 0
    assert synthetic_tokenizers.entries([1, 2]) == 2
    assert "pad_token" in synthetic_tokenizers.KINDS["wav2vec2"]  # the blank of CTC


class Part:
    @classmethod
    def from_pretrained(cls, name: str, subfolder: str) -> str:
        return f"{name}/{subfolder}"


class Pipeline:
    def __init__(
        self, unet: Part, image_encoder: Part, vae: Part | None, safe: bool = True
    ) -> None: ...


def test_a_pipeline_is_made_of_its_parts() -> None:
    parts = dict(public_configs.pipeline_parts(Pipeline, "a/xl", {"unet": 3}))
    assert parts == {"unet": 3, "image_encoder": None, "vae": "a/xl/vae", "safe": True}
    assert public_configs.pipeline_class(Pipeline, "a/b") is Pipeline
    general: Any = type("DiffusionPipeline", (), {})
    assert public_configs.pipeline_class(general, "a/unknown") is None
