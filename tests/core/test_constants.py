"""Every number of these rooms says where it comes from."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import memfit
from memfit.constants import KINDS, all_constants
from memfit.report.timing import timing

ROOT = Path(memfit.__file__).parent
ROOMS = ("hardware", "runs", "simulate", "plan", "techniques")
UNITS = {0, 1, 2, 3, 4, 8, 10, 0.5, 100, 1024, 3600, 511, 1e3, 1e6, 1e9, 1e12, 1e-3, 1e-6, 1e-9}
CUT = (ast.Slice, ast.JoinedStr)  # lengths of what is shown, not of what is predicted


def numbers(node: ast.AST, skip: tuple[type[ast.AST], ...]) -> Iterator[ast.Constant]:
    """Numbers of an expression that are not units, without those inside of `skip`."""
    if isinstance(node, skip):
        return
    number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
    if isinstance(node, ast.Constant) and number and node.value not in UNITS:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from numbers(child, skip)


def bare(path: Path) -> Iterator[str]:
    """Places of a file where a number stands without its origin."""
    tree = ast.parse(path.read_text())
    for statement in tree.body:
        if isinstance(statement, ast.Assign):  # a call makes a record, with a source of its own
            wrong = list(numbers(statement.value, (*CUT, ast.Call)))
        elif isinstance(statement, ast.AnnAssign):
            origin = ast.unparse(statement.annotation).startswith("Annotated[")
            wrong = [] if origin else list(numbers(statement, (*CUT, ast.Call)))
        else:
            wrong = [
                one
                for one in numbers(statement, CUT)
                if isinstance(one.value, float) or int(str(one.value)) > 512
            ]
        yield from (f"{path.relative_to(ROOT)}:{one.lineno}: {one.value}" for one in wrong)


@pytest.mark.parametrize("room", ROOMS)
def test_no_number_without_origin(room: str) -> None:
    found = [place for path in sorted((ROOT / room).rglob("*.py")) for place in bare(path)]
    assert not found


def test_a_bare_number_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text("RATE = 0.7\nPARTS = (1, 37)\ndef f(x):\n    return x * 1.37 + x[:80]\n")
    assert list(bare(path)) == ["module.py:1: 0.7", "module.py:2: 37", "module.py:4: 1.37"]


def test_every_origin_is_complete() -> None:
    found = list(all_constants("memfit.band", *(f"memfit.{room}" for room in ROOMS)))
    assert len(found) > 60
    for one in found:
        assert one.origin.kind in KINDS
        assert one.origin.what
        assert one.origin.source or one.origin.kind == "setting", one
    fitted = {one.name for one in found if one.origin.kind == "fitted"}
    assert fitted == {"LAUNCHES", "TRAINED", "TAIL"}


def test_explain_names_the_origin_of_what_matters() -> None:
    cluster = memfit.estimate(
        "llama-3.2-1b", gpus="2xa100", use="ddp", method="full", precision="bf16", batch=1, seq=128
    )
    lines = "\n".join(timing(cluster))
    assert "communication, counted: seconds of a call of NCCL" in lines
    alone = memfit.estimate(
        "llama-3.2-1b", gpu="a100", framework="transformers", method="full", batch=1, seq=64
    )
    assert "launch, fitted: seconds that Python" in "\n".join(timing(alone))
