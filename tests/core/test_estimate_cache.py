"""Traced estimates on disk: the same answer again, and a damaged or absent cache is no obstacle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit import disk_cache, estimate_cache
from memfit.estimate import Estimate, estimate
from memfit.hardware import Cluster, find_gpu
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.report import FORMATS, write
from memfit.strategy import ONE
from memfit.trace.wire import from_text, to_text

MODEL = build(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
    }
)
CLUSTER = Cluster(gpu=find_gpu("t4"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(job: Job) -> Estimate:
    """An estimate of a tape that says it is a trace's, as another process hands it over."""

    def producer(*question: Any) -> Any:
        tape = replace(lower(*question[:2]), source="trace", versions={"torch": "0"})
        return from_text(to_text(tape))

    return estimate(MODEL, job, CLUSTER, producer=producer)


def asked(job: Job) -> tuple[Estimate, bool]:
    name = estimate_cache.key(MODEL, job, CLUSTER, ONE, None, ())
    return estimate_cache.remembered(name, MODEL, job, CLUSTER, lambda: made(job))


@pytest.mark.parametrize(
    "job", [Job(seq=64), Job(task="inference", seq=64), Job(seq=2**19, batch=8)]
)
def test_every_report_of_a_cached_estimate_is_the_same(folder: Path, job: Job) -> None:
    (first, old), (again, cached) = asked(job), asked(job)
    assert (old, cached) == (False, True)
    for form in FORMATS:
        for explain in (False, True):
            one, other = (
                write(found, form, explain=explain, width=100, colour=False)
                for found in (first, again)
            )
            assert one == other
    assert again == first


def test_another_question_is_no_hit(folder: Path) -> None:
    asked(Job(seq=64))
    assert not asked(Job(seq=65))[1]
    assert len(list(folder.glob("*.json"))) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"checksum": 1, "answer": {}}', b"\xff"])
def test_a_damaged_entry_is_made_again(folder: Path, damage: bytes) -> None:
    asked(Job(seq=64))
    (entry,) = folder.glob("*.json")
    entry.write_bytes(damage)
    assert not asked(Job(seq=64))[1]
    assert asked(Job(seq=64))[1]


def test_an_entry_whose_numbers_were_changed_is_not_trusted(folder: Path) -> None:
    asked(Job(seq=64))
    (entry,) = folder.glob("*.json")
    data = json.loads(entry.read_text())
    data["answer"]["memory"]["allocated"] += 512
    entry.write_text(json.dumps(data))
    assert not asked(Job(seq=64))[1]


def test_a_folder_that_cannot_be_made_is_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "file" / "cache"))
    assert asked(Job(seq=64))[0].memory.allocated
    assert not asked(Job(seq=64))[1]


def test_off_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(disk_cache.VARIABLE, "off")
    assert disk_cache.folder() is None


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(disk_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk_cache.folder() == tmp_path / "memfit"


def test_every_file_of_memfit_counts_but_compiled_ones(tmp_path: Path) -> None:
    """Graphs are JSON, GPUs are TOML."""
    for name in ("code.py", "gpus.toml", "graphs/llama.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}", encoding="utf-8")
        before = disk_cache.code_fingerprint(tmp_path)
        assert disk_cache.code_fingerprint(tmp_path) == before
        path.write_text("{ }", encoding="utf-8")
        assert disk_cache.code_fingerprint(tmp_path) != before
    before = disk_cache.code_fingerprint(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "code.pyc").write_bytes(b"")
    assert disk_cache.code_fingerprint(tmp_path) == before
    assert disk_cache.code_fingerprint(tmp_path / "absent") != before
