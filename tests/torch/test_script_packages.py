"""Packages that a script imports and that are not installed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from memfit.api.verbs import trace
from memfit.errors import InputError
from memfit.trace import lines
from memfit.trace.unused_packages import Unused

STEP = """
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
UNUSED = """
import importlib.util, torch
import surely_not_installed.datasets as datasets
from surely_not_installed.parallel import Shard, tensor_parallel
from surely_not_installed import *
assert not isinstance(torch.ones(1), Shard)

def other(model):
    return tensor_parallel(model, Shard.rows)

assert importlib.util.find_spec("nor_this_one") is None
try:
    import nor_this_one
except ImportError:
    nor_this_one = None

def has_apex():
    import nor_this_either
    return True

try:
    found = has_apex()
except ImportError:
    found = False
assert nor_this_one is None and not found
"""
USES = {
    "called": "tensor_parallel(1)",
    "subclassed": "class Mine(Shard): ...",
    "attribute": "datasets.Multi30k.splits('.')",
    "iterated": "list(datasets.names)",
    "asked": "if Shard.enabled: ...",
    "version": "import surely_not_installed; surely_not_installed.__version__",
}


def test_a_package_that_is_not_used_is_not_needed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNUSED + STEP)
    found = trace(script)
    said = [one.message for one in found.problems]
    assert [one for one in said if "`surely_not_installed` is not installed" in one]
    assert not [one for one in said if "nor_this" in one]


@pytest.mark.parametrize("use", USES)
def test_its_first_use_is_an_error(
    tmp_path: Path, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n".join([*UNUSED.splitlines()[2:4], USES[use]]))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Unused(lambda *_: None)])
    try:
        with pytest.raises(ModuleNotFoundError) as caught:
            runpy.run_path(str(script))
    finally:
        for name in [one for one in sys.modules if one.startswith("surely_not_installed")]:
            del sys.modules[name]
    assert caught.value.name == "surely_not_installed"
    assert lines.failed(caught.value.__traceback__).startswith("train.py:3")


def test_a_package_that_changes_others_is_needed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch, unsloth" + STEP)
    with pytest.raises(InputError, match="needs the package `unsloth`"):
        trace(script)
