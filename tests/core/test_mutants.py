"""The tool that changes the source and asks whether a test notices."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
import time
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
    assert list(made.places(ast.parse("for a, b in zip(x, y, strict=True):\n    pass\n"))) == []
    assert len(list(made.places(ast.parse("said(x, strict=True)")))) == 1
    for source, count in (
        ("if a.x > b:\n    b = a.x\n", 0),
        ("if b <= a:\n    b = a\n", 0),
        ("if a > b:\n    b, at = a, place\n", 1),
        ("if a > b:\n    b = c\n", 1),
        ("if a == b:\n    b = a\n", 1),
        ("if a > b:\n    b = a\nelse:\n    c = a\n", 1),
    ):
        assert len(list(made.places(ast.parse(source)))) == count, source


def test_only_a_failing_test_is_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tool()
    file = next(iter(made.ROOMS))
    (tmp_path / "memfit").mkdir()
    (tmp_path / "memfit" / file).write_text("kept = 1\n")
    mutant = made.Mutant(file, 1, "a -> b", "kept = 2\n")
    for code, lives in ((0, True), (1, False), (2, None), (4, None), (5, None), (-9, None)):
        monkeypatch.setattr(made, "tested", lambda *_, code=code: code)
        assert made.survives(mutant, tmp_path, ("test_a.py",), made.Room(9.0, {}), 0) is lives
    assert (tmp_path / "memfit" / file).read_text() == "kept = 1\n"


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("nothing", "no room begins with `nothing`"),
        ("formats", "fail without a change: test_quantized.py"),
    ],
)
def test_what_cannot_be_judged_is_said(
    only: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = tool()
    shutil.copy(made.SOURCE / "formats.py", tmp_path)
    monkeypatch.setattr(made, "SOURCE", tmp_path)
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


def ran(tmp_path: Path, plan: dict[str, object], test: str) -> subprocess.CompletedProcess[str]:
    """What the runner does with a file of tests."""
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "test_it.py").write_text(test)
    options = ("-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".", "test_it.py")
    runner = ROOT / "tools" / "tests_in_order.py"
    return subprocess.run(
        [sys.executable, str(runner), "plan.json", *options],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
    )


def test_a_change_cannot_take_all_memory(tmp_path: Path) -> None:
    made = tool()
    for size, code in ((3 << 29, made.PASSED), (6 << 30, made.FAILED)):
        test = f"import mmap\ndef test_it():\n    mmap.mmap(-1, {size})\n"
        assert ran(tmp_path, {"order": []}, test).returncode == code


def test_a_test_that_a_change_makes_endless_has_failed(tmp_path: Path) -> None:
    made = tool()
    test = "def test_it():\n    while True:\n        pass\n"
    begin = time.monotonic()
    code = ran(tmp_path, {"order": [("test_it.py::test_it", 0.2)]}, test).returncode
    assert code == made.FAILED
    assert time.monotonic() - begin < 60
    test = "import time\ndef test_it():\n    time.sleep(0.3)\n"  # a busy machine is no loop
    assert ran(tmp_path, {"order": [("test_it.py::test_it", 0.2)]}, test).returncode == 0


def test_tests_that_reach_a_change_run_first_and_quick_ones_before_slow_ones(
    tmp_path: Path,
) -> None:
    made = tool()
    source = "A = 1\ndef f(x):\n    if x > 5:\n        return x\n    return 3 + A\n"
    places = [ast.unparse(node) for node, *_ in made.places(ast.parse(source))]
    marks = {places.index("5"): 70, places.index("3"): 71}
    (tmp_path / "it.py").write_text(made.marked(source, marks))
    test = (
        "import time, it\n"
        "def test_large():\n    assert it.f(9) == 9\n"
        "def test_neither():\n    assert it.A\n"
        "def test_slow():\n    time.sleep(0.1)\n    assert it.f(1) == 4\n"
        "def test_small():\n    assert it.f(1) == 4\n"
    )
    done = ran(tmp_path, {"record": "notes.json"}, f"import sys\nsys.path.append('.')\n{test}")
    assert done.returncode == made.PASSED, done.stdout
    notes = json.loads((tmp_path / "notes.json").read_text())
    names = {name.split("::")[1]: reached for name, (_, reached) in notes.items()}
    assert names == {
        "test_large": [70],
        "test_neither": [],
        "test_slow": [70, 71],
        "test_small": [70, 71],
    }
    assert next(iter(notes)).endswith("test_small")  # the last one of the file first
    order = [name.split("::")[1] for name, _ in made.Room(1.0, notes).order(71)]
    assert order[:2] == ["test_small", "test_slow"]
    assert set(order[2:]) == {"test_large", "test_neither"}


def test_marks_change_nothing_that_a_function_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tool()
    source = (
        "def f(x, add=2):\n"
        '    """What it says."""\n'
        "    while x > 3:\n        x -= 2\n"
        "    if x == 1:\n        return 10\n"
        "    elif x == 2:\n        return 20 + add\n"
        "    try:\n        y = 1 // x\n    except ZeroDivisionError:\n        return 7\n"
        "    match y:\n        case 0:\n            return 30\n"
        "    return y - 1\n"
    )
    count = len(list(made.places(ast.parse(source))))
    plain, alone, noted, seen = {}, {}, {}, set()
    exec(source, plain)  # noqa: S102
    text = made.marked(
        f"from __future__ import annotations\n{source}", {one: one for one in range(count)}
    )
    exec(text, alone)  # noqa: S102 - in a process that a test starts
    monkeypatch.setattr("builtins.__reached__", seen.add, raising=False)
    exec(text, noted)  # noqa: S102
    for space in (alone, noted):
        assert [plain["f"](x) for x in range(-1, 9)] == [space["f"](x) for x in range(-1, 9)]
    assert noted["f"].__doc__ == "What it says."
    assert seen == set(range(count))


def test_a_change_that_never_ends_is_noticed_and_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tool()
    file = next(iter(made.ROOMS))
    (tmp_path / "memfit").mkdir()
    (tmp_path / "memfit" / file).write_text("kept = 1\n")
    limits = []

    def endless(names: tuple[str, ...], tree: Path, plan: object, limit: float) -> int:
        limits.append(limit)
        raise subprocess.TimeoutExpired("pytest", limit)

    monkeypatch.setattr(made, "tested", endless)
    mutant = made.Mutant(file, 1, "a -> b", "kept = 2\n")
    assert made.survives(mutant, tmp_path, ("test_a.py",), made.Room(9.0, {}), 0) is False
    assert made.room_of("test_a.py", tmp_path) is None
    assert limits == [9.0, made.LIMIT]
    (tmp_path / "notes.json").write_text("{}")
    monkeypatch.setattr(made, "tested", lambda *_: made.PASSED)
    room = made.room_of("test_a.py", tmp_path)
    assert made.START <= room.limit < 2 * made.START
    one, other = made.Room(30.0, {"a": (1.0, [2])}), made.Room(40.0, {"b": (2.0, [])})
    assert made.together([one, other]) == made.Room(70.0, {"a": (1.0, [2]), "b": (2.0, [])})
    assert made.together([one] * 99).limit == made.LIMIT


def test_a_quick_sample_runs_no_slow_test() -> None:
    made = tool()
    chosen = made.sample(100, 0, "", quick=True)
    assert {one.file for one in chosen} >= {"band.py", "simulate/memory.py", "truth/rows.py"}
    assert not {one.file for one in chosen} & {"truth/blind.py", "simulate/generating.py"}
    assert made.tests_of("simulate/memory.py", quick=True) == ("test_memory.py",)
    assert made.tests_of("simulate/memory.py", quick=False)[-1] == "test_compact.py"
    listed = {name for names in made.ROOMS.values() for name in names}
    assert listed >= made.SLOW


def test_every_change_differs_from_the_copied_source_in_one_line() -> None:
    made = tool()
    one = made.sample(1, 3, "formats")[0]
    before = made.plain(one.file).splitlines()
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
