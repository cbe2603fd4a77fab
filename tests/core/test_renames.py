"""Old names of options and of JSON fields: they work for a version, and say what is new."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

import memfit
from memfit import renames
from memfit.cli import main
from memfit.renames import FIELDS, OPTIONS, Renamed, RenamedWarning

ROW = Renamed("tokens_each", "seq", "9.9")
SAID = "`--tokens-each` is now `--seq`; memfit 9.9 drops the old name"


@pytest.fixture
def one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renames, "OPTIONS", (*OPTIONS, ROW))


def test_every_row_ends_in_a_later_version_than_this() -> None:
    """A row whose version is there has to go, and what it kept alive with it."""
    now = tuple(map(int, memfit.__version__.split(".")[:2]))
    for one in (*OPTIONS, *FIELDS):
        assert tuple(map(int, one.until.split("."))) > now, one


@pytest.mark.usefixtures("one_more")
def test_an_old_flag_works_and_says_what_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "gpt2", "--json", "--offline"]
    assert main([*words, "--tokens-each", "64"]) == 0
    old = capsys.readouterr()
    assert json.loads(old.out)["job"]["seq"] == 64
    assert old.err == f"warning: {SAID}\n"
    assert main([*words, "--seq", "64"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("one_more")
def test_an_old_key_of_a_job_file_and_an_old_argument_work(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: gpt2\ntokens-each: 64\noffline: true\n")
    with pytest.warns(RenamedWarning, match="is now `--seq`"):
        found = memfit.estimate(job)
    assert found.job.seq == 64
    with pytest.warns(RenamedWarning, match="is now `--seq`"):
        again = memfit.estimate("gpt2", offline=True, tokens_each=64)
    assert again.device == found.device


def test_the_rank_of_a_measured_layout_is_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--rank` meant the process before it meant LoRA's rank here, too."""
    seen = []
    module = importlib.import_module("memfit.measure.run")
    monkeypatch.setattr(module, "measure", lambda case, *_, **__: seen.append(case))
    with pytest.warns(RenamedWarning, match="`--rank` is now `--process`"):
        memfit.measure("gpt2", use="fsdp=4", rank=3, framework="transformers")
    memfit.measure("gpt2", use="fsdp=4", rank=8, method="lora", framework="transformers")
    assert [(case.rank, case.job.rank) for case in seen] == [(3, 16), (0, 8)]


def test_an_old_json_field_is_there_and_listed() -> None:
    found = memfit.estimate(
        "llama-3.1-8b", method="lora", gpu="rtx-3060-12gb", advise=True, offline=True
    ).to_dict()
    assert found["advice"]["rungs"] == found["advice"]["ways"][0]["rungs"]
    assert found["deprecated"] == [
        {"name": "advice.rungs", "use": "advice.ways[].rungs", "until": "0.3"}
    ]
    assert memfit.estimate("gpt2", offline=True).to_dict()["deprecated"] == []
