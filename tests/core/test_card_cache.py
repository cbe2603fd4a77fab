"""Cards on disk: the same answer again, and never that of another question."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memfit import disk_cache
from memfit.api.card import name_on_disk, question
from memfit.cli import main

CONFIG = {  # on no GPU, which is quickly found out
    "model_type": "llama",
    "hidden_size": 2**17,
    "intermediate_size": 2**19,
    "num_hidden_layers": 2,
    "num_attention_heads": 1024,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
SMALL = {**CONFIG, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
KEPT = {"code": 0, "text": "from disk", "data": ["from disk"]}
Out = pytest.CaptureFixture[str]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("MEMFIT_GPUS", str(tmp_path / "gpus.toml"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path / "cache"


def asked(cache: Path, capsys: Out, *words: str, gpu: str = "t4") -> str:
    """What the command prints, after which all entries have another answer."""
    where = ["--gpu", gpu] if gpu else []
    assert main([str(cache.parent / "config.json"), *where, "--offline", *words]) < 2
    for entry in cache.glob("*.json"):
        disk_cache.write(entry.stem, KEPT)
    return capsys.readouterr().out


def test_the_same_card_again(cache: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache.parent / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    words = [str(cache.parent / "config.json"), "--gpu", "t4", "--offline"]
    monkeypatch.setenv(disk_cache.VARIABLE, "off")
    codes = [main(words), main([*words, "--json"])]
    plain = capsys.readouterr().out
    assert not cache.exists()
    monkeypatch.setenv(disk_cache.VARIABLE, str(cache))
    for _ in range(2):
        assert [main(words), main([*words, "--json"])] == codes
        assert capsys.readouterr().out == plain
    assert len(list(cache.iterdir())) == 1  # for both forms
    asked(cache, capsys)
    assert asked(cache, capsys) == "from disk\n"
    assert json.loads(asked(cache, capsys, "--json")) == ["from disk"]


def test_another_question_is_asked_anew(cache: Path, capsys: Out) -> None:
    asked(cache, capsys)
    assert asked(cache, capsys) == "from disk\n"
    for gpu, words in (("t4", ("--memory", "8GiB")), ("2xt4", ()), ("", ())):
        assert asked(cache, capsys, *words, gpu=gpu) != "from disk\n"
        assert asked(cache, capsys, *words, gpu=gpu) == "from disk\n"


def test_another_config_is_asked_anew(cache: Path, capsys: Out) -> None:
    """Also where no size differs."""
    for change in ({"num_hidden_layers": 3}, {"rope_theta": 5e5}):
        asked(cache, capsys)
        assert asked(cache, capsys) == "from disk\n"
        changed = json.dumps({**CONFIG, **change})
        (cache.parent / "config.json").write_text(changed, encoding="utf-8")
        assert asked(cache, capsys) != "from disk\n"


@pytest.mark.parametrize("gpu", ["mine", "t4", ""])
def test_other_gpus_of_the_user_are_asked_anew(cache: Path, capsys: Out, gpu: str) -> None:
    """Also as what would make a row fit, and by what they cost."""
    own = cache.parent / "gpus.toml"
    own.write_text('[mine]\nlike = "a100-sxm-80gb"\nprice = 1.5\n', encoding="utf-8")
    asked(cache, capsys, gpu=gpu)
    assert asked(cache, capsys, gpu=gpu) == "from disk\n"
    for line in ("price = 1.25", 'price = 1.25\nmemory = "47GiB"'):
        own.write_text(f'[mine]\nlike = "a100-sxm-80gb"\n{line}\n', encoding="utf-8")
        assert asked(cache, capsys, gpu=gpu) != "from disk\n"


def test_other_code_is_asked_anew(cache: Path, tmp_path: Path) -> None:
    one = question(str(tmp_path / "config.json"), {"gpu": "t4", "offline": True})
    (tmp_path / "code").mkdir()
    names = {name_on_disk(one), name_on_disk(one)}
    for text in ("x = 1", "x = 10"):
        (tmp_path / "code" / "lower.py").write_text(text, encoding="utf-8")
        names.add(name_on_disk(one, tmp_path / "code"))
    assert len(names) == 3


def test_a_name_that_llamacpp_reads_from_elsewhere_counts(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of GGUF files read the model by its name, which a folder of that name shadows."""
    monkeypatch.chdir(cache.parent)
    one = question("qwen3-0.6b", {"gpu": "t4", "offline": True})
    before = name_on_disk(one)
    folder = cache.parent / one.models[0].name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    assert name_on_disk(one) != before


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"checksum": 1, "answer": {}}', b"\xff"])
def test_a_damaged_entry_is_asked_anew(cache: Path, capsys: Out, damage: bytes) -> None:
    first = asked(cache, capsys)
    (entry,) = cache.glob("*.json")
    entry.write_bytes(damage)
    assert asked(cache, capsys) == first
