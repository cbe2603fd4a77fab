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
