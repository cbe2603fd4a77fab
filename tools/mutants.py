"""Do the tests notice? Changes one place of the source at a time, runs the tests of its room, and
counts the changes that no test fails on.

python tools/mutants.py [--count 30] [--seed 0] [--only simulate/allocator.py] [--jobs 2] [--quick]
                        [--all]

A sample is drawn by the seed, so that two runs are about the same changes. Of the share that was
killed the 95 % interval is printed (Wilson's), and each survivor as soon as it is known: what was
judged before Ctrl-C is a sample too. Tests have MEMORY bytes of address space, so that a change
cannot eat the machine. The exit code is 1 where less than LEAST of the changes are killed.
`--quick` leaves out tests that take longer than seconds, and files that have no others: so `make
test` can ask it each time. `--all` lists the changes that were killed, too.
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
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "memfit"
PASSED, FAILED = 0, 1  # pytest's exit codes
LIMIT = 240.0  # seconds for the tests of a room, at most; a change that never ends is noticed
SLOWER, START = 10, 20.0  # times the tests without a change, and seconds beside them, until then
MEMORY = 6 << 30  # address space of a test run; the tests of all rooms need 2 GiB at most
LIMITED = f"""\
import resource, sys, pytest
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
sys.exit(pytest.main(sys.argv[1:]))"""
LEAST = 0.5  # of the changes; the aim is 0.9. Of 30 changes a run with three quarters has this
# Rooms, and the tests that have to notice. The first that fails is enough: quick ones come first.
ROOMS = {
    "band.py": ("test_band.py",),
    "plan/advice.py": ("test_advice.py",),
    "plan/card.py": ("test_card.py",),
    "plan/furthest.py": ("test_card.py",),
    "plan/engine_goals.py": ("test_engine_plan.py",),
    "plan/engine_search.py": ("test_engine_plan.py",),
    "plan/frontier.py": ("test_frontier.py",),
    "plan/study.py": ("test_study.py",),
    "plan/trade_offs.py": ("test_study.py",),
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
    "truth/blind.py": ("test_blind.py",),
    "truth/published.py": ("test_published.py", "test_unseen_rows.py"),
    "truth/rows.py": ("test_rows.py", "test_published.py"),
    "truth/words.py": ("test_published.py", "test_unseen_rows.py"),
    "truth/plain.py": ("test_unseen_rows.py", "test_published.py"),
    "techniques/activation_offload.py": ("test_activation_offload.py",),
    "techniques/framework.py": (
        "test_frameworks.py",
        "test_torchtitan_experts.py",
        "test_what_goes_together.py",
    ),
    "techniques/separate_experts.py": ("test_separate_experts.py",),
    "techniques/stored.py": ("test_quantized.py", "test_gguf.py"),
    "hardware/nccl.py": ("test_nccl.py",),
    "hardware/outside.py": ("test_hardware.py",),
    "lower/stored.py": ("test_quantized.py",),
}
SLOW = {  # tests of more than seconds
    "test_activation_offload.py",
    "test_advice.py",
    "test_blind.py",
    "test_card.py",
    "test_compact.py",
    "test_engine_plan.py",
    "test_estimate.py",
    "test_frontier.py",
    "test_runs.py",
    "test_speed.py",
    "test_study.py",
    "test_time.py",
    "test_what_goes_together.py",
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


def mutant(file: str, number: int) -> Mutant:
    """The source of a file with its place of that number changed."""
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    node, field, value = list(places(tree))[number]
    before = ast.unparse(node)
    setattr(node, field, value)
    change = f"{before} -> {ast.unparse(node)}"
    return Mutant(file, getattr(node, "lineno", 0), change, ast.unparse(tree))


def count_of(file: str) -> int:
    return len(list(places(ast.parse((SOURCE / file).read_text(encoding="utf-8")))))


def tests_of(file: str, quick: bool) -> tuple[str, ...]:
    """The tests that have to notice a change of the file."""
    return tuple(name for name in ROOMS[file] if not quick or name not in SLOW)


def sample(count: int, seed: int, only: str, quick: bool = False) -> list[Mutant]:
    """Files weigh as many places as they have."""
    files = [file for file in ROOMS if file.startswith(only) and tests_of(file, quick)]
    known = [(file, number) for file in files for number in range(count_of(file))]
    chosen = random.Random(seed).sample(known, min(count, len(known)))
    return [mutant(*one) for one in chosen]


def copied(tree: Path, files: set[str]) -> None:
    """The sources; those that change are written from their syntax trees, as every change is."""
    shutil.copytree(SOURCE, tree / "memfit", ignore=shutil.ignore_patterns("__pycache__"))
    for file in files:
        path = tree / "memfit" / file
        path.write_text(ast.unparse(ast.parse(path.read_text(encoding="utf-8"))), encoding="utf-8")


def survives(one: Mutant, tree: Path, names: tuple[str, ...], limit: float) -> bool | None:
    """Whether no test fails on the change. A failing test or an endless one has noticed it; what
    else pytest returns (sources that cannot be imported, no tests) says nothing: None."""
    target = tree / "memfit" / one.file
    before = target.read_text(encoding="utf-8")
    target.write_text(one.text, encoding="utf-8")
    try:
        code = tested(names, tree, limit)
    except subprocess.TimeoutExpired:
        return False
    finally:
        target.write_text(before, encoding="utf-8")
    return {PASSED: True, FAILED: False}.get(code)


def limit_of(names: tuple[str, ...], tree: Path) -> float | None:
    """Seconds after which a change counts as endless; None where the tests fail without one."""
    begin = time.monotonic()
    try:
        code = tested(names, tree, LIMIT)
    except subprocess.TimeoutExpired:
        return None
    taken = time.monotonic() - begin
    return min(LIMIT, SLOWER * taken + START) if code == PASSED else None


def tested(names: tuple[str, ...], tree: Path, limit: float) -> int:
    """What pytest returns for these tests over the sources of `tree`."""
    tests = [str(ROOT / "tests" / "core" / name) for name in names]
    command = [sys.executable, "-c", LIMITED, "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-o", f"pythonpath={tree} {ROOT}"]
    done = subprocess.run(
        [*command, *tests],
        cwd=ROOT,
        env={**os.environ, "CI": "1", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        timeout=limit,
        check=False,
    )
    return done.returncode


def interval(killed: int, count: int) -> tuple[float, float]:
    z, share = 1.96, killed / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z * ((share * (1 - share) + z * z / (4 * count)) / count) ** 0.5 / (1 + z * z / count)
    return middle - reach, middle + reach


def report_of(one: Mutant, alive: bool | None) -> str:
    said = {True: "survived", False: "killed", None: "not judged (no test ran)"}[alive]
    return f"{said}: {one.file}:{one.line}: {one.change}"


def report(lives: list[bool | None]) -> int:
    """The share of the changes that was killed; the exit code."""
    judged, killed = len(lives) - lives.count(None), lives.count(False)
    if not judged:
        print("no change was judged")
        return 2
    low, high = interval(killed, judged)
    print(f"killed {killed} of {judged} ({100 * low:.0f} to {100 * high:.0f} %)")
    return int(killed < LEAST * judged)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--all", action="store_true", help="print the changes that were killed too")
    asked = parser.parse_args()
    chosen = sample(asked.count, asked.seed, asked.only, asked.quick)
    if not chosen:
        print(f"nothing to change: no room begins with `{asked.only}`: {', '.join(ROOMS)}")
        return 2
    print(f"{len(chosen)} changes of seed {asked.seed}", flush=True)
    files = {one.file for one in chosen}
    groups = sorted({tests_of(file, asked.quick) for file in files})
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        trees: Queue[Path] = Queue()
        for number in range(asked.jobs):
            copied(Path(folder) / str(number), files)
            trees.put(Path(folder) / str(number))

        def borrow(function: Callable[[Path], T]) -> T:
            tree = trees.get()
            try:
                return function(tree)
            finally:
                trees.put(tree)

        limits = dict(
            zip(
                groups,
                pool.map(lambda names: borrow(lambda tree: limit_of(names, tree)), groups),
                strict=True,
            )
        )
        wrong = [" ".join(names) for names, limit in limits.items() if limit is None]
        if wrong:
            print(f"the tests fail without a change: {', '.join(wrong)}")
            return 2

        def judge(one: Mutant) -> None:
            names = tests_of(one.file, asked.quick)
            alive = borrow(lambda tree: survives(one, tree, names, limits[names] or LIMIT))
            lives.append(alive)
            if alive is not False or asked.all:
                print(report_of(one, alive), flush=True)

        lives: list[bool | None] = []
        try:
            list(pool.map(judge, chosen))
        except KeyboardInterrupt:
            print(f"stopped after {len(lives)} of {len(chosen)} changes")
            pool.shutdown(cancel_futures=True)
    return report(lives)


if __name__ == "__main__":
    sys.exit(main())
