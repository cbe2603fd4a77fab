"""The tool that changes the source and asks whether a test notices."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tool() -> ModuleType:
    given = importlib.util.spec_from_file_location("mutants_tool", ROOT / "tools" / "mutants.py")
    assert given is not None
    assert given.loader is not None
    module = importlib.util.module_from_spec(given)
    sys.modules["mutants_tool"] = module
    given.loader.exec_module(module)
    return module


def test_each_change_is_one_place_of_valid_source() -> None:
    made = tool()
    source = "@data(frozen=True)\ndef f(x: int = 3) -> bool:\n    return x + 2 < 7 and True\n"
    tree = ast.parse(source)
    changes = []
    for node, field, value in list(made.places(tree)):
        old = getattr(node, field)
        setattr(node, field, value)
        changes.append(ast.unparse(tree).splitlines()[-1].strip())
        setattr(node, field, old)
    assert "return x - 2 < 7 and True" in changes
    assert "return x + 2 <= 7 and True" in changes
    assert "return x + 2 < 7 or True" in changes
    assert "return x + 2 < 7 and False" in changes
    assert "return x + 20 < 7 and True" in changes
    assert "frozen=False" not in ast.unparse(tree)
    assert len(changes) == 7  # and the default 3, and the 7


def test_only_a_failing_test_is_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tool()
    file = next(iter(made.ROOMS))
    (tmp_path / "memfit").mkdir()
    (tmp_path / "memfit" / file).write_text("kept = 1\n")
    mutant = made.Mutant(file, 1, "a -> b", "kept = 2\n")
    for code, lives in ((0, True), (1, False), (2, None), (4, None), (5, None), (-9, None)):
        monkeypatch.setattr(made, "tested", lambda *_, code=code: code)
        assert made.survives(mutant, tmp_path) is lives
    assert (tmp_path / "memfit" / file).read_text() == "kept = 1\n"


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("nothing", "no room begins with `nothing`"),
        ("formats", "fail without a change: formats.py"),
    ],
)
def test_what_cannot_be_judged_is_said(
    only: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tool()
    monkeypatch.setattr(sys, "argv", ["mutants.py", "--only", only, "--count", "2"])
    monkeypatch.setattr(made, "survives", lambda mutant, tree: bool(mutant.change))
    assert made.main() == 2
    assert said in capsys.readouterr().out


def test_what_was_not_judged_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    made = tool()
    one = made.Mutant("band.py", 3, "a -> b", "")
    made.report([one] * 4, [True, False, False, None])
    said = capsys.readouterr().out
    assert "survived: band.py:3: a -> b" in said
    assert "not judged (no test ran): band.py:3" in said
    assert "killed 2 of 3 (" in said
    made.report([one], [None])
    assert "no change was judged" in capsys.readouterr().out


def test_a_sample_is_the_same_for_a_seed_and_every_room_has_its_tests() -> None:
    made = tool()
    assert made.sample(5, 1, "hardware") == made.sample(5, 1, "hardware")
    assert made.sample(5, 1, "hardware") != made.sample(5, 2, "hardware")
    for file, tests in made.ROOMS.items():
        assert (ROOT / "src" / "memfit" / file).is_file()
        assert all((ROOT / "tests" / "core" / name).is_file() for name in tests)
    assert made.interval(90, 100) == (
        pytest.approx(0.826, abs=0.001),
        pytest.approx(0.945, abs=0.001),
    )
