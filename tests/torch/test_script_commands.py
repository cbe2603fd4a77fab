"""Commands that packages install, as a way to start a program."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.api.verbs import trace
from memfit.cli.trace import split

PROGRAM = """
import os, sys, torch

def main():
    assert sys.argv == ["tinytrain", "fit", "--width", "64"] and os.environ["DEPTH"] == "2"
    model = torch.nn.Linear(int(sys.argv[3]), 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        optimizer.step()
"""


def test_an_installed_command_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tinytrain.py").write_text(PROGRAM)
    about = tmp_path / "tinytrain-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tinytrain\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[console_scripts]\ntinytrain = tinytrain:main\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = trace("-- tinytrain", "fit", "--width", "64", launcher="DEPTH=2")
    assert found.script is not None
    assert found.script.steps == 3


def test_words_of_a_command() -> None:
    valued = {"--gpu": True}
    found = split(["--gpu", "t4", "--", "env", "A=1", "trl", "sft", "--config", "a.yaml"], valued)
    assert found.subject == "-- trl"
    assert found.launcher == "env A=1"
    assert found.arguments == ["sft", "--config", "a.yaml"]
    assert split(["--", "accelerate", "launch", "--config_file", "a.yaml"], {}).subject == ""
