"""The tool that changes the source and asks whether a test notices."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
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
        assert made.survives(mutant, tmp_path, ("test_a.py",), 9.0) is lives
    assert (tmp_path / "memfit" / file).read_text() == "kept = 1\n"


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("nothing", "no room begins with `nothing`"),
        ("formats", "fail without a change: test_quantized.py"),
    ],
)
def test_what_cannot_be_judged_is_said(
    only: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tool()
    monkeypatch.setattr(sys, "argv", ["mutants.py", "--only", only, "--count", "2"])
    monkeypatch.setattr(made, "tested", lambda *_: made.FAILED)
    assert made.main() == 2
    assert said in capsys.readouterr().out


def test_what_was_not_judged_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    made = tool()
    one = made.Mutant("band.py", 3, "a -> b", "")
    assert made.report_of(one, True) == "survived: band.py:3: a -> b"
    assert made.report_of(one, None).startswith("not judged (no test ran): band.py:3")
    assert made.report([True, False, False, None]) == 0
    assert "killed 2 of 3 (" in capsys.readouterr().out
    assert made.report([None]) == 2
    assert "no change was judged" in capsys.readouterr().out
    assert made.report([False] * 5 + [True] * 5) == 0
    assert made.report([False] * 4 + [True] * 6) == 1


def test_a_change_cannot_take_all_memory(tmp_path: Path) -> None:
    made = tool()
    for name, size in (("small", made.MEMORY // 4), ("large", made.MEMORY)):
        (tmp_path / f"test_{name}.py").write_text(
            f"import mmap\ndef test_it():\n    mmap.mmap(-1, {size})\n"
        )
        options = ("-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"test_{name}.py")
        done = subprocess.run(
            [sys.executable, "-c", made.LIMITED, *options],
            cwd=tmp_path,
            capture_output=True,
            check=False,
        )
        assert done.returncode == (made.PASSED if name == "small" else made.FAILED)


def test_a_change_that_never_ends_is_noticed_and_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tool()
    file = next(iter(made.ROOMS))
    (tmp_path / "memfit").mkdir()
    (tmp_path / "memfit" / file).write_text("kept = 1\n")
    limits = []

    def endless(names: tuple[str, ...], tree: Path, limit: float) -> int:
        limits.append(limit)
        raise subprocess.TimeoutExpired("pytest", limit)

    monkeypatch.setattr(made, "tested", endless)
    mutant = made.Mutant(file, 1, "a -> b", "kept = 2\n")
    assert made.survives(mutant, tmp_path, ("test_a.py",), 9.0) is False
    assert made.limit_of(("test_a.py",), tmp_path) is None
    assert limits == [9.0, made.LIMIT]
    monkeypatch.setattr(made, "tested", lambda *_: made.PASSED)
    assert made.START <= (made.limit_of(("test_a.py",), tmp_path) or 0) < 2 * made.START


def test_a_quick_sample_runs_no_slow_test() -> None:
    made = tool()
    chosen = made.sample(100, 0, "", quick=True)
    assert {one.file for one in chosen} >= {"band.py", "simulate/memory.py", "truth/rows.py"}
    assert not {one.file for one in chosen} & {"runs/walker.py", "plan/study.py"}
    assert made.tests_of("simulate/memory.py", quick=True) == ("test_memory.py",)
    assert made.tests_of("simulate/memory.py", quick=False)[-1] == "test_estimate.py"
    listed = {name for names in made.ROOMS.values() for name in names}
    assert listed >= made.SLOW


def test_every_change_differs_from_the_copied_source_in_one_line(tmp_path: Path) -> None:
    made = tool()
    one = made.sample(1, 3, "formats")[0]
    made.copied(tmp_path, {one.file})
    before = (tmp_path / "memfit" / one.file).read_text().splitlines()
    after = one.text.splitlines()
    assert len(before) == len(after)
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1


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
