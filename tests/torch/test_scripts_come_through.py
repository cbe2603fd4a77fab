"""Small things at which scripts of other people stopped, a few lines for each, and the ways in
which people start a program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memfit.cli_trace import split
from memfit.errors import InputError
from memfit.verbs import trace

STEPS = """
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
best = 1e9
for _ in range(3):
    loss = model(torch.randn(8, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    each(model, loss, best)
"""
MAKERS = """
import torch
gpu = torch.device("cuda")
made = [
    torch.tensor([1, 2], device="cuda"), torch.tensor(1.5, device=gpu), torch.tensor([1], device=0),
    torch.as_tensor([1.0], device="cuda"), torch.as_tensor(torch.ones(2), device=gpu),
    torch.asarray([1.0], device="cuda"), torch.zeros(2, device=gpu),
]
small = torch.tensor([1, 2, 3])
there = small.to(gpu)
made += [
    small.to(gpu, torch.float32), small.to(gpu, torch.int32), (small > 1).to(gpu, torch.int32),
    there.to(made[0].device, torch.int32), (there != 2).to(gpu, torch.int32),
    there.to(device=gpu, dtype=torch.int32), there.new_tensor([1, 2]), made[1].new_tensor([1.0]),
]
assert all(one.is_cuda for one in made), [one.device for one in made]
assert not there.new_tensor([1], device="cpu").is_cuda
assert there.to(gpu) is there
last = (torch.arange(3, device=gpu) * (there != 2).to(gpu, torch.int32)).argmax(-1)  # as in heads

from torch.utils.flop_counter import FlopCounterMode  # asks whether functions are Triton's
import functorch
stream = torch.cuda.Stream()
with torch.cuda.stream(stream=stream), torch.cuda.device(device=0):
    pass


def each(model, loss, best):
    if loss > 3 or loss < best or not torch.allclose(loss, loss + 1):
        pass
    if (model.weight > 0).any():
        raise SystemExit("a condition was taken as true")
    drawn = torch.randn(8, 8, device="cuda")
    drawn[drawn > 0] = 0
    assert torch.masked_select(drawn, drawn > 0).shape == (64,)
    assert (drawn > 0).nonzero().shape == (64, 2)
    assert len(torch.where(drawn > 0)) == 2
"""


def test_small_things_come_through(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MAKERS + STEPS)
    found = trace(script)
    assert found.script is not None
    assert found.script.steps == 3
    assert [one.level for one in found.problems] == ["note"] * len(found.problems)
    assert any("conditions" in one.message for one in found.problems)
    with pytest.raises(InputError, match="taken as true"):
        trace(script, assume="true")


def test_modules_and_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands behind them is theirs, whatever it is called."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "own.py").write_text("def each(*_): ...\n")
    ours = "import sys, torch\nfrom .own import each\nassert sys.argv[1:] == ['--gpu', '0']\n"
    (package / "train.py").write_text(ours + STEPS)
    monkeypatch.chdir(tmp_path)
    found = trace("-m package.train", "--gpu", "0", gpu="t4")
    assert found.script is not None
    assert found.script.steps == 3
    cells = [
        {"cell_type": "markdown", "source": ["# not code"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "import torch\n"]},
        {"cell_type": "code", "source": ["!pip install it\n", "def each(*_): ...\n", STEPS]},
    ]
    Path("run.ipynb").write_text(json.dumps({"cells": cells}))
    assert trace("run.ipynb", gpu="t4").script is not None
    Path("bad.ipynb").write_text("[]")
    with pytest.raises(InputError, match="no notebook"):
        trace("bad.ipynb")


def test_whose_words_are_whose() -> None:
    valued = {"--gpu": True, "--json": False}
    told = split(["--gpu", "t4", "train.py", "--gpu", "0", "--json", "--", "x"], valued)
    assert told == ("train.py", ["--gpu", "t4"], ["--gpu", "0", "--json", "--", "x"], "")
    told = split(["--json", "-m", "package.train", "--gpu", "0"], valued)
    assert told == ("-m package.train", ["--json"], ["--gpu", "0"], "")
    told = split(["gpt2", "--gpu", "t4"], valued)
    assert told == ("gpt2", ["--gpu", "t4"], [], "")
