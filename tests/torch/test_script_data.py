"""Data that a script prepares, saves and loads again, as training scripts of other people do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import transformers

from memfit.api.verbs import trace
from memfit.cli.trace import split

SCRIPT = """
import io
import json
import os
import torch
from datasets import Dataset, load_dataset

try:
    from scipy.io import wavfile
except ImportError:
    wavfile = None
try:
    from PIL import Image
except ImportError:
    Image = None

def rows(path, sampling_rate):
    rate, samples = wavfile.read(path)
    assert rate == sampling_rate, rate
    return samples / 32768.0

assert wavfile is None or len(rows("LJSpeech/wavs/LJ001-0001.wav", 22050)) > 22050
assert "input_ids" not in load_dataset("someone/raw", split="train").column_names
assert "story" in load_dataset("someone/raw", split="train").column_names
pairs = Dataset.from_parquet("data/pairs.parquet")
assert pairs[0]["question"].split() and len(pairs) > 100

turns = pairs[1]["conversations"]
turns = json.loads(pairs[1]["conversations"]) if isinstance(turns, str) else turns
assert [turn["role"] for turn in turns] == ["user", "assistant"] and turns[0]["content"]
assert Image.open(io.BytesIO(pairs[2]["image_bytes"])).size[0] > 64 if Image else True

images = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
os.makedirs("cache", exist_ok=True)
torch.save({"images": images, "names": ["a"]}, "cache/train.pt")
data = torch.load("cache/train.pt", map_location=torch.device("cuda"))
assert data["images"].device.type == "cuda" and data["names"] == ["a"]
assert torch.equal(torch.load("cache/train.pt")["images"], images)

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "step": step}, "cache/best.pt")
    best = torch.load("cache/best.pt", map_location="cpu")
    assert best["model"]["weight"].device.type == "cpu" and best["step"] == step
    before = torch.cuda.memory_allocated()
    again = torch.load("cache/best.pt")
    assert again["model"]["weight"].shape == (64, 64)
    more = torch.cuda.memory_allocated() - before
    assert more == (0 if step else 64 * 64 * 4 + 512)  # the last ones are let go of
    model.load_state_dict(again["model"])
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer)["bias"].device.type == "cuda"
"""


def test_what_a_script_prepares_saves_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    found = trace(str(script), gpu="h100", steps=0)
    assert found.memory.allocated > 3 * 64 * 64 * 4
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


def test_what_cannot_be_kept_is_not_what_was_there_before(tmp_path: Path) -> None:
    import torch
    from memfit.trace.saved_values import keep, loaded

    place = tmp_path / "best.pt"
    place.touch()
    keep(place, {"step": 1}, torch.save)
    assert loaded(place, None, torch.load) == {"step": 1}
    keep(place, torch.nn.Linear(2, 2), torch.save)  # a whole module
    with pytest.raises(KeyError):
        loaded(place, None, torch.load)


def test_a_notebook_behind_two_dashes_is_one() -> None:
    assert split(["--", "train.ipynb"], {})[:1] == ("train.ipynb",)
    assert split(["--", "train.py", "--lr", "1"], {}).launcher == ""


def test_a_processor_counts_its_patches_and_takes_any_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from memfit.trace import synthetic_processors, vision_tokens

    vision = SimpleNamespace(image_size=224, patch_size=14)
    config = SimpleNamespace(vision_config=vision)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda _: config)
    kind = type("Reader", (), {"size": {"height": 384, "width": 384}})
    found = synthetic_processors.size_of(kind, "someone/model")
    assert found == {"size": {"height": 224, "width": 224}, "image_seq_length": 256}

    def refuse(*_: object) -> None:
        raise TypeError("another class was expected")

    class Mixin:
        check_argument_for_proper_class = refuse

    module = SimpleNamespace(ProcessorMixin=Mixin)
    patches = vision_tokens.changes()["transformers.processing_utils"](cast(Any, module))
    check = {name: value for _, name, value in patches}["check_argument_for_proper_class"]
    made = type("PreTrainedTokenizerFast", (), {})()
    assert check(None, "tokenizer", made) is type(made)
    with pytest.raises(TypeError, match="another class"):
        check(None, "image_processor", made)
