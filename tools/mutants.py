"""Do the tests notice? Changes one place of the source at a time, runs the tests of its room, and
counts the changes that no test fails on.

python tools/mutants.py [--count 30] [--seed 0] [--only simulate/allocator.py] [--jobs 2]

A sample is drawn by the seed, so that two runs are about the same changes. Of the share that was
killed the 95 % interval is printed (Wilson's).
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "memfit"
PASSED, FAILED = 0, 1  # pytest's exit codes
LIMIT = 240  # seconds for the tests of a room; a change that never ends is noticed
# Rooms, and the tests that have to notice. The first that fails is enough: quick ones come first.
ROOMS = {
    "band.py": ("test_band.py",),
    "runs/batches.py": ("test_runs.py",),
    "runs/changes.py": ("test_runs.py",),
    "runs/lengths.py": ("test_runs.py",),
    "runs/risk.py": ("test_runs.py",),
    "runs/texts.py": ("test_runs.py",),
    "runs/walker.py": ("test_runs.py",),
    "runs/whole_run.py": ("test_runs.py",),
    "formats.py": ("test_quantized.py",),
    "simulate/allocator.py": ("test_allocator.py", "test_allocator_settings.py"),
    "simulate/bill.py": ("test_time.py", "test_runs.py"),
    "simulate/blocks.py": ("test_memory.py", "test_allocator.py"),
    "simulate/expandable.py": ("test_allocator_settings.py", "test_allocator.py"),
    "simulate/generating.py": ("test_time.py", "test_speed.py"),
    "simulate/memory.py": ("test_memory.py", "test_estimate.py"),
    "simulate/peaks.py": ("test_compact.py", "test_memory.py"),
    "simulate/replay.py": ("test_allocator.py", "test_replay.py"),
    "simulate/run.py": ("test_runs.py",),
    "simulate/settings.py": ("test_allocator_settings.py",),
    "simulate/time.py": ("test_time.py", "test_speed.py"),
    "truth/rows.py": ("test_published.py",),
    "truth/words.py": ("test_published.py", "test_unseen_rows.py"),
    "truth/plain.py": ("test_unseen_rows.py", "test_published.py"),
    "techniques/stored.py": ("test_quantized.py", "test_gguf.py"),
    "hardware/nccl.py": ("test_nccl.py",),
    "hardware/outside.py": ("test_hardware.py",),
    "lower/stored.py": ("test_quantized.py",),
}
OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Mutant(NamedTuple):
    """A change: the file, where, and what the file says then."""

    file: str
    line: int
    change: str
    text: str


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, object]]:
    """Each node that can be changed, the field, and its new value."""
    quiet: set[int] = set()
    for node in ast.walk(tree):  # neither types nor how a dataclass is built
        apart = [getattr(node, name, None) for name in ("annotation", "returns")]
        for part in (*apart, *getattr(node, "decorator_list", ())):
            if isinstance(part, ast.AST):
                quiet.update(id(one) for one in ast.walk(part))
    for node in ast.walk(tree):
        if id(node) in quiet:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE:
            yield node, "ops", [OPPOSITE[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPPOSITE:
            yield node, "op", OPPOSITE[type(node.op)]()
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, "value", not node.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield node, "value", node.value * 10 if node.value > 1 else node.value + 1


def mutants(file: str) -> list[Mutant]:
    text = (SOURCE / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    found = []
    for node, field, value in list(places(tree)):
        before, old = ast.unparse(node), getattr(node, field)
        setattr(node, field, value)
        change = f"{before} -> {ast.unparse(node)}"
        found.append(Mutant(file, getattr(node, "lineno", 0), change, ast.unparse(tree)))
        setattr(node, field, old)
    return found


def sample(count: int, seed: int, only: str) -> list[Mutant]:
    """Files weigh as many places as they have."""
    known = [one for file in ROOMS if file.startswith(only) for one in mutants(file)]
    return random.Random(seed).sample(known, min(count, len(known)))


def unchanged(file: str) -> Mutant:
    """The source as it is, but written from its syntax tree, as every change is."""
    text = (SOURCE / file).read_text(encoding="utf-8")
    return Mutant(file, 0, "", ast.unparse(ast.parse(text)))


def survives(mutant: Mutant, tree: Path) -> bool | None:
    """Whether no test fails on the change. A failing test or an endless one has noticed it; what
    else pytest returns (sources that cannot be imported, no tests) says nothing: None."""
    target = tree / "memfit" / mutant.file
    before = target.read_text(encoding="utf-8")
    target.write_text(mutant.text, encoding="utf-8")
    try:
        code = tested(ROOMS[mutant.file], tree)
    except subprocess.TimeoutExpired:
        return False
    finally:
        target.write_text(before, encoding="utf-8")
    return {PASSED: True, FAILED: False}.get(code)


def tested(names: tuple[str, ...], tree: Path) -> int:
    """What pytest returns for these tests over the sources of `tree`."""
    tests = [str(ROOT / "tests" / "core" / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-o", f"pythonpath={tree} {ROOT}"]
    done = subprocess.run(
        [*command, *tests],
        cwd=ROOT,
        env={**os.environ, "CI": "1", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    return done.returncode


def interval(killed: int, count: int) -> tuple[float, float]:
    z, share = 1.96, killed / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z * ((share * (1 - share) + z * z / (4 * count)) / count) ** 0.5 / (1 + z * z / count)
    return middle - reach, middle + reach


def report(chosen: list[Mutant], lives: list[bool | None]) -> None:
    """Which changes survived, and the share that was killed."""
    for one, alive in zip(chosen, lives, strict=True):
        if alive is not False:
            said = "survived" if alive else "not judged (no test ran)"
            print(f"{said}: {one.file}:{one.line}: {one.change}")
    judged, killed = len(lives) - lives.count(None), lives.count(False)
    if not judged:
        print("no change was judged")
        return
    low, high = interval(killed, judged)
    print(f"killed {killed} of {judged} ({100 * low:.0f} to {100 * high:.0f} %)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    chosen = sample(asked.count, asked.seed, asked.only)
    if not chosen:
        print(f"nothing to change: no room begins with `{asked.only}`: {', '.join(ROOMS)}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for number in range(asked.jobs):
            tree = Path(folder) / str(number)
            shutil.copytree(SOURCE, tree / "memfit", ignore=shutil.ignore_patterns("__pycache__"))
            trees.put(tree)

        def judge(mutant: Mutant) -> bool | None:
            tree = trees.get()
            try:
                return survives(mutant, tree)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(asked.jobs) as pool:
            whole = [unchanged(file) for file in sorted({one.file for one in chosen})]
            passing = list(pool.map(judge, whole))
            if not all(passing):
                wrong = [one.file for one, good in zip(whole, passing, strict=True) if not good]
                print(f"the tests fail without a change: {', '.join(wrong)}")
                return 2
            lives = list(pool.map(judge, chosen))
    report(chosen, lives)
    return 0


if __name__ == "__main__":
    sys.exit(main())
