"""memfit stays light: what an import may not pull in, tried in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import memfit

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Imported by nobody before they are needed: each costs from 20 ms (yaml) to seconds (torch).
HEAVY = tuple(PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-module-level-imports"])
NEEDS_EXTRA = ("memfit.trace", "memfit.measure", "memfit.server")

BLOCK = """
import importlib, json, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            raise ImportError(f"blocked: {name}")

heavy, modules = json.loads(sys.argv[1])
sys.meta_path.insert(0, Block())
failed = {}
for module in modules:
    try:
        importlib.import_module(module)
    except ImportError as error:
        failed[module] = str(error)
print(json.dumps(failed))
"""


def python(code: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules() -> list[str]:
    paths = sorted(SRC.glob("memfit/**/*.py"))
    names = [".".join(path.relative_to(SRC).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def blocked(heavy: tuple[str, ...], names: list[str]) -> dict[str, str]:
    failed: dict[str, str] = json.loads(python(BLOCK, json.dumps([heavy, names])))
    return failed


# What a user's process imports before it does anything: the package, and the command line.
@pytest.mark.parametrize("entry", ["memfit", "memfit.__main__", "memfit.cli"])
def test_an_entry_point_imports_nothing_heavy(entry: str) -> None:
    loaded = set(python(f"import {entry}, sys; print(*sys.modules)").split())
    assert loaded & set(HEAVY) == set()


def test_an_estimate_loads_no_other_question() -> None:
    words = "estimate", "qwen3-0.6b", "--method", "lora", "--gpu", "rtx-4090", "--offline"
    code = "import sys; from memfit.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    loaded = set(python(code, *words).splitlines()[-1].split())
    others = ("runs", "plan", "trace", "serving.base", "api.plan", "api.card", "api.capture")
    assert "memfit.simulate.replay" in loaded
    assert loaded & {f"memfit.{name}" for name in others} == set()


def test_every_module_outside_trace_and_measure_imports_without_heavy_packages() -> None:
    names = [name for name in modules() if not name.startswith(NEEDS_EXTRA)]
    assert len(names) > 5
    assert blocked(HEAVY, names) == {}


def test_the_block_works() -> None:
    assert blocked(("wave",), ["wave", "memfit"]) == {"wave": "blocked: wave"}


def test_the_version_is_printed_without_the_command_line() -> None:
    code = (
        "import sys; sys.argv = ['memfit', '--version']; from memfit.__main__ import main; main(); "
        "print(*sys.modules)"
    )
    version, loaded = python(code).splitlines()
    assert version == f"memfit {memfit.__version__}"
    assert set(loaded.split()).isdisjoint({"click", "typing", "dataclasses", "memfit.cli"})


def test_an_estimate_loads_nothing_that_it_does_not_use() -> None:
    words = ["estimate", "llama-3.1-8b", "--method", "lora", "--gpu", "rtx-4090", "--offline"]
    script = (
        f"import sys\nfrom memfit.cli import main\nassert main({words}) == 0\n"
        "print(sorted({'statistics', 'memfit.graph', 'yaml', 'urllib.request'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
