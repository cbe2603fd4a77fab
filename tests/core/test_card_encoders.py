"""Cards of encoders: one pass over each sequence, and fine-tuning by the Trainer."""

import json
import shlex
from pathlib import Path

import pytest

from memfit.api.card import card
from memfit.api.question import question
from memfit.cli import main
from memfit.estimate import estimate
from memfit.model import catalog
from memfit.plan.card import Card
from memfit.plan.shelf import Shelf
from memfit.report.card import text
from memfit.report.figures import gib

BERT = "google-bert/bert-base-uncased"


@pytest.fixture(scope="module")
def found() -> Card:
    answer = card(BERT, gpu="t4", offline=True)
    assert isinstance(answer, Card)
    return answer


def test_every_batch_fits_and_a_larger_one_does_not(found: Card) -> None:
    assert [row.use.key for row in found.rows] == ["16-bit", "full", "lora"]
    for row in found.rows:
        asked = question(BERT, {"gpu": "t4", "offline": True, **row.use.options}, [])
        job = asked.job.replace(batch=row.most)
        assert estimate(asked.model, job, asked.cluster).verdict == "fits"
        job = asked.job.replace(batch=row.most + row.most // 16 + 2)
        assert estimate(asked.model, job, asked.cluster).verdict != "fits"
        assert row.longest == 512  # BERT has no more positions


def test_rows_are_the_answers_of_their_commands(
    found: Card, capsys: pytest.CaptureFixture[str]
) -> None:
    for row in found.rows:
        assert main([*shlex.split(row.command)[1:], "--offline"]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"fits: {gib(row.device)} GiB of ")
        assert row.tokens_per_second
        shown = float(said.partition(" tokens/s")[0].split()[-1].replace(",", ""))
        assert shown == pytest.approx(row.tokens_per_second, rel=0.006)


def test_nothing_is_called_an_answer(found: Card) -> None:
    said = text(found)
    assert said.startswith(f"{BERT} on Tesla T4: runs in 16-bit and fine-tunes with all weights\n")
    assert "defaults of transformers' Trainer" in said
    assert "answer" not in said
    assert "TRL" not in said


def test_a_pass_over_a_sequence_has_the_speed_of_its_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["estimate", BERT, "--task", "inference", "--gpu", "t4", "--seq", "128", "--offline"])
    said = capsys.readouterr().out
    line = next(one for one in said.splitlines() if one.startswith("a forward pass takes"))
    seconds = float(line.split()[4]) / 1000
    shown = float(line.partition(" tokens/s")[0].split()[-1].replace(",", ""))
    assert shown == pytest.approx(128 / seconds, rel=0.06)  # whole milliseconds
    assert "time to first token" not in said


def test_an_encoder_with_a_decoder_is_fine_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["google/flan-t5-small", "--gpu", "t4", "--offline"]) == 0
    said = capsys.readouterr().out
    assert "on Tesla T4: fine-tunes with all weights" in said.splitlines()[0]
    assert "\nrunning" not in said


def test_a_checkpoint_without_a_head_runs_without_one(found: Card, tmp_path: Path) -> None:
    """Logits of masked words, which it does not have, would be most of its memory."""
    config = {**catalog.entry(BERT).config(), "architectures": ["BertModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = card(str(tmp_path), gpu="t4", offline=True)
    assert isinstance(answer, Card)
    assert [row.job.head for row in answer.rows] == ["none", "classification", "classification"]
    assert answer.rows[0].most > 2 * found.rows[0].most


@pytest.mark.parametrize(
    ("family", "least", "first"),
    [
        ("bert", {BERT}, "runs bert-large-uncased and fine-tunes bert-large-uncased"),
        ("flan-t5", {"google/flan-t5-base"}, "fine-tunes flan-t5-"),
    ],
)
def test_a_family_of_encoders(family: str, least: set[str], first: str) -> None:
    answer = card(family, gpu="t4", offline=True)
    assert isinstance(answer, Shelf)
    assert least <= {one.name for one in answer.lines}
    said = text(answer)
    assert f"Tesla T4 (14.6 GiB usable) {first}" in said
    assert "the Trainer's defaults" in said


def test_the_smallest_gpu_for_an_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([BERT, "--offline"]) == 0
    said = capsys.readouterr().out
    assert "runs in 16-bit from " in said
    assert "\ntune, full" in said
