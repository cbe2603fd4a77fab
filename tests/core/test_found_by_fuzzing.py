"""What a fuzzer found once, a test for each class: files that are no files, words that YAML 1.1
takes for numbers, errors about numbers that nobody wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from memfit.api.verbs import estimate
from memfit.cli import main
from memfit.errors import InputError
from memfit.model.families import build, families
from memfit.words.job_files import mapping

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
LATENT = [
    example
    for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
    for example in families()[kind].examples[:1]
]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("attention", ["flash-attn-2", "flash-attn-3"])
@pytest.mark.parametrize("example", LATENT, ids=lambda one: str(one["model_type"]))
def test_latent_attention_goes_through_flash_attn(example: dict[str, Any], attention: str) -> None:
    """Values are narrower than queries: they are padded."""
    for job in ({}, {"packing": False}, {"task": "inference", "new_tokens": 4}):
        estimate(example, gpu="h100-sxm", attention=attention, seq=64, precision="bf16", **job)


@pytest.mark.parametrize("value", [None, [], 3, "none", {}])
def test_a_quantization_that_is_none(config: Path, value: Any) -> None:
    config.write_text(json.dumps({**SMALL, "quantization_config": value}))
    assert main(["estimate", str(config)]) in (0, 2)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name")
def test_a_pipe_is_no_file(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither to read nor to write: it would wait for the other end."""
    pipes = [tmp_path / name for name in ("job.yaml", "p.json", "p.svg")]
    for one in pipes:
        os.mkfifo(one)
    job, model, picture = map(str, pipes)
    assert "not a regular file" in complaint(capsys, "estimate", job)
    assert "not a regular file" in complaint(capsys, "estimate", model)
    plan = ("plan", str(config), "--gpus", "1xl4", "--write")
    assert "not a regular file" in complaint(capsys, *plan, job)
    assert "not a regular file" in complaint(capsys, "trace", str(config), "--timeline", picture)
    assert "not a regular file" in complaint(capsys, "study", str(config), "--heatmap", picture)
    assert "not a regular file" in complaint(capsys, "accuracy", "--plot", picture)


def test_a_plan_replaces_no_file_unless_it_may(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "mine.yaml"
    kept.write_text("mine")
    words = ["plan", str(config), "--gpus", "1xl4", "--seq", "64", "--method", "full"]
    words += ["--checkpointing", "none", "--optimizer", "adamw", "--write", str(kept)]
    assert "`--overwrite` replaces it" in complaint(capsys, *words)
    assert kept.read_text() == "mine"
    assert main([*words, "--overwrite"]) == 0
    assert "model:" in kept.read_text()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config.json", "mine.yaml"]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("34:08", "34:08"),
        ("02000", 2000),
        ("0o20", 16),
        ("0x10", 16),
        ("1_000", "1_000"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("2026-11-24", "2026-11-24"),
        ("1e-4", 1e-4),
        (".5", 0.5),
        ("~", None),
        ("", None),
    ],
)
def test_job_files_are_yaml_1_2(word: str, value: Any) -> None:
    assert mapping(Path("job.yaml"), f"seq: {word}\nother: 1") == {"seq": value, "other": 1}


def test_nothing_is_said_of_numbers_that_nobody_wrote() -> None:
    """A missing number has a stand-in, which divides and pairs with nothing."""
    for example in (one for family in families().values() for one in family.examples[:1]):
        for key, value in example.items():
            if isinstance(value, int) and not isinstance(value, bool):
                said = blamed({**example, key: "many"})
                assert said <= {f"config.{key}"}, (example["model_type"], key)


def blamed(config: dict[str, Any]) -> set[str]:
    try:
        build(config)
    except InputError as bad:
        return {one.where for one in bad.problems}
    return set()


@pytest.mark.parametrize("version", ["transformers=0.0", "torch=0.4", "transformers=4.2"])
def test_a_version_from_before_everything_is_refused(version: str) -> None:
    with pytest.raises(InputError, match="the oldest supported"):
        estimate(SMALL, versions=version)


def test_what_a_config_leaves_open_is_said(config: Path) -> None:
    """Not of the catalog's, which were compared with the models themselves."""
    few = {key: value for key, value in SMALL.items() if "key_value" not in key}
    del few["tie_word_embeddings"]
    config.write_text(json.dumps(few))
    said = [one.message for one in estimate(str(config)).problems]
    assert any("`num_key_value_heads` as 4" in one for one in said)
    assert any("`tie_word_embeddings` as false" in one for one in said)
    config.write_text(json.dumps(SMALL))
    assert not any("leaves open" in one.message for one in estimate(str(config)).problems)


def test_a_size_that_a_graph_halves_is_even() -> None:
    """It ended in a ValueError."""
    config = {**families()["deepseek_v32"].examples[0], "qk_rope_head_dim": 7}
    with pytest.raises(InputError, match=r"do not go together: `1/2\*qk_rope_head_dim` is 7/2"):
        build(config)
