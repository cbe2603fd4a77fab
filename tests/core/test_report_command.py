"""`memfit report` and `memfit cache`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memfit.cli import main

ASK = ["llama-3.2-1b", "--framework", "transformers", "--method", "lora", "--gpu", "rtx-4090"]


def test_a_wrong_estimate_becomes_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.json"
    words = ["report", *ASK, "--measured", "21.5GiB", "--counter", "device", "--out", str(path)]
    assert main(words) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["measured"] == {"counter": "nvidia-smi", "bytes": 21.5 * 2**30}
    assert found["predicted"] == found["estimate"]["memory"]["device"]
    assert found["error"] == round(found["predicted"] / found["measured"]["bytes"] - 1, 4)
    assert found["config"]["model_type"] == "llama"
    assert "nothing has been sent" in capsys.readouterr().out


def test_a_report_is_never_written_over_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("mine", encoding="utf-8")
    assert main(["report", *ASK, "--measured", "20GiB", "--out", str(path)]) == 2
    assert path.read_text(encoding="utf-8") == "mine"
    assert "already exists" in capsys.readouterr().err


def test_what_is_wrong_with_a_report_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *ASK, "--measured", "much", "--counter", "heap"]) == 2
    text = capsys.readouterr().err
    assert "`much`" in text
    assert "unknown counter `heap`" in text


def test_the_cache_says_where_it_is_and_can_be_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    (tmp_path / "one.json").write_text("{}", encoding="utf-8")
    (tmp_path / "other.txt").write_text("not ours", encoding="utf-8")
    assert main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"] == 1
    assert main(["cache", "--clear"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]
    monkeypatch.setenv("MEMFIT_CACHE", "off")
    assert main(["cache"]) == 0
    assert "off" in capsys.readouterr().out.splitlines()[-1]
