"""Do the tests notice? Changes one place of the source at a time, runs the tests of its room, and
counts the changes that no test fails on.

python tools/mutants.py [--count 30] [--seed 0] [--only simulate/allocator.py] [--jobs 2] [--quick]
                        [--all]

A sample is drawn by the seed, so that two runs are about the same changes. Of the share that was
killed the 95 % interval is printed (Wilson's), and each survivor as soon as it is known: what was
judged before Ctrl-C is a sample too. First the tests run without a change, over sources that note
which test reaches which place; then each change runs all tests of its room, those that reach it
before the others and quick ones before slow ones, until one fails. The exit code is 1 where less
than LEAST of the changes are killed. `--quick` leaves out tests that take longer than seconds, and
files that have no others: so `make test` can ask it each time. `--all` lists the changes that were
killed, too.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "memfit"
PASSED, FAILED = 0, 1  # pytest's exit codes
LIMIT = 240.0  # seconds for the tests of a room, at most; a change that never ends is noticed
SLOWER, START = 10, 10.0  # times the tests without a change, and seconds beside them, until then
RUNNER = ROOT / "tools" / "tests_in_order.py"
LEAST = 0.5  # of the changes; the aim is 0.9. Of 30 changes a run with three quarters has this
# Rooms, and the tests that have to notice. The first that fails is enough: quick ones come first.
ROOMS = {
    "band.py": ("test_band.py",),
    "plan/advice.py": ("test_plan_parts.py", "test_advice.py"),
    "plan/card.py": ("test_plan_parts.py", "test_card_parts.py", "test_card.py"),
    "plan/shelf.py": ("test_card_parts.py", "test_card.py"),
    "plan/furthest.py": ("test_plan_parts.py", "test_card.py"),
    "plan/engine_goals.py": ("test_engine_plan_parts.py", "test_engine_plan.py"),
    "plan/engine_search.py": ("test_engine_plan_parts.py", "test_engine_plan.py"),
    "plan/frontier.py": ("test_study_parts.py", "test_frontier.py"),
    "plan/study.py": ("test_study_parts.py", "test_study.py"),
    "plan/trade_offs.py": ("test_study_parts.py", "test_study.py"),
    "runs/batches.py": ("test_run_parts.py", "test_runs.py"),
    "runs/changes.py": ("test_run_changes.py", "test_runs.py"),
    "runs/lengths.py": ("test_run_parts.py", "test_runs.py"),
    "runs/risk.py": ("test_run_parts.py", "test_run_changes.py", "test_runs.py"),
    "runs/texts.py": ("test_run_parts.py", "test_run_changes.py", "test_runs.py"),
    "runs/walker.py": ("test_run_parts.py", "test_runs.py"),
    "runs/whole_run.py": ("test_run_parts.py", "test_runs.py"),
    "formats.py": ("test_quantized.py",),
    "simulate/allocator.py": (
        "test_allocator.py",
        "test_allocator_settings.py",
        "test_allocator_properties.py",
    ),
    "simulate/bill.py": ("test_time.py", "test_runs.py"),
    "simulate/blocks.py": ("test_memory.py", "test_allocator.py", "test_allocator_properties.py"),
    "simulate/expandable.py": ("test_allocator.py", "test_allocator_properties.py"),
    "simulate/generating.py": ("test_time.py", "test_speed.py"),
    "simulate/memory.py": ("test_memory.py", "test_estimate.py", "test_compact.py"),
    "simulate/peaks.py": ("test_compact.py", "test_memory.py"),
    "simulate/replay.py": ("test_allocator.py", "test_replay.py", "test_memory.py"),
    "simulate/run.py": ("test_run_parts.py", "test_run_changes.py", "test_runs.py"),
    "simulate/settings.py": ("test_allocator_settings.py", "test_allocator.py"),
    "simulate/time.py": ("test_time.py", "test_time_megatron.py", "test_speed.py"),
    "truth/blind.py": ("test_blind.py",),
    "truth/published.py": ("test_published.py", "test_unseen_rows.py"),
    "truth/rows.py": ("test_rows.py", "test_published.py"),
    "truth/words.py": ("test_row_words.py", "test_published.py", "test_unseen_rows.py"),
    "truth/plain.py": ("test_row_words.py", "test_unseen_rows.py", "test_published.py"),
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
    "test_allocator_properties.py",
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
# Processes that tests start have no one who takes notes.
MARK = "__reached__ = getattr(__import__('builtins'), '__reached__', abs)"
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
    number: int = 0  # of the places of its file


class Room(NamedTuple):
    """The tests of a room without a change: how long all may take with one, and for each test how
    long it took and which of the chosen places it reached."""

    limit: float
    tests: dict[str, tuple[float, list[int]]]

    def order(self, place: int) -> list[tuple[str, float]]:
        """The tests that reach the place, quick ones first, then the others; and how many seconds
        of the processor each may take."""

        def late(name: str) -> tuple[bool, float]:
            taken, reached = self.tests[name]
            return place not in reached, taken

        return [
            (name, SLOWER * self.tests[name][0] + START) for name in sorted(self.tests, key=late)
        ]


def kept_up(node: ast.AST) -> bool:
    """Whether a statement keeps up a maximum or a minimum, `if a > b: b = a`: where both are equal
    it makes no difference."""
    if not isinstance(node, ast.If) or node.orelse or len(node.body) != 1:
        return False
    test, body = node.test, node.body[0]
    if not isinstance(test, ast.Compare) or not isinstance(body, ast.Assign):
        return False
    if not isinstance(test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        return False
    sides = {ast.unparse(test.left), *map(ast.unparse, test.comparators)}
    return {ast.unparse(one) for one in (*body.targets, body.value)} == sides


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, object]]:
    """Each node that can be changed, the field, and its new value."""
    quiet: set[int] = set()
    # Neither types nor how a dataclass is built; nor what no answer depends on: whether a `zip`
    # checks that both are as long, and what becomes of equal values where a maximum is kept up.
    for node in ast.walk(tree):
        apart = [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip":
            apart += [one.value for one in node.keywords]
        if kept_up(node):
            quiet.add(id(getattr(node, "test", None)))
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
    return Mutant(file, getattr(node, "lineno", 0), change, ast.unparse(tree), number)


def blocks_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The blocks of statements right below a statement."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value:
            if isinstance(value[0], ast.stmt):
                yield value
            for part in value:
                if isinstance(part, ast.ExceptHandler | ast.match_case):
                    yield part.body


def marked(text: str, marks: dict[int, int]) -> str:
    """The source with a call of `__reached__` before each statement that holds a place of `marks`,
    which numbers some of the places. A function's defaults count as its first statement."""
    tree = ast.parse(text)
    known = {id(one[0]): number for number, one in enumerate(places(tree)) if number in marks}

    def walk(block: list[ast.stmt]) -> None:
        for statement in list(block):
            inner = list(blocks_of(statement))
            below = {id(one) for part in inner for child in part for one in ast.walk(child)}
            calls = [
                ast.parse(f"__reached__({marks[known[id(one)]]})").body[0]
                for one in ast.walk(statement)
                if id(one) in known and id(one) not in below
            ]
            for part in inner:
                walk(part)
            if isinstance(statement, ast.FunctionDef):
                statement.body[1:1] = calls
            else:
                place = block.index(statement)
                block[place:place] = calls

    walk(tree.body)
    future = [number for number, one in enumerate(tree.body) if isinstance(one, ast.ImportFrom)]
    tree.body.insert(future[0] + 1 if future else 0, ast.parse(MARK).body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


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


def written(tree: Path, texts: dict[str, str]) -> None:
    """Files of a copy of the sources in another form. Their compiled form goes: Python goes by
    size and second, and changes come quickly."""
    for file, text in texts.items():
        target = tree / "memfit" / file
        target.write_text(text, encoding="utf-8")
        for path in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
            path.unlink()


def plain(file: str) -> str:
    """A source as its syntax tree writes it, as every change is written."""
    return ast.unparse(ast.parse((SOURCE / file).read_text(encoding="utf-8")))


def survives(
    one: Mutant, tree: Path, names: tuple[str, ...], room: Room, place: int
) -> bool | None:
    """Whether no test fails on the change. A failing test or an endless one has noticed it; what
    else pytest returns (sources that cannot be imported, no tests) says nothing: None."""
    before = (tree / "memfit" / one.file).read_text(encoding="utf-8")
    written(tree, {one.file: one.text})
    try:
        code = tested(names, tree, {"order": room.order(place)}, room.limit)
    except subprocess.TimeoutExpired:
        return False
    finally:
        written(tree, {one.file: before})
    return {PASSED: True, FAILED: False}.get(code)


def room_of(name: str, tree: Path) -> Room | None:
    """What the tests of a file do without a change; None where they fail without one."""
    notes = tree / "notes.json"
    begin = time.monotonic()
    try:
        code = tested((name,), tree, {"record": str(notes)}, LIMIT)
    except subprocess.TimeoutExpired:
        return None
    taken = time.monotonic() - begin
    if code != PASSED:
        return None
    limit = min(LIMIT, SLOWER * taken + START)
    return Room(limit, json.loads(notes.read_text(encoding="utf-8")))


def together(rooms: Sequence[Room]) -> Room:
    """Several files of tests as one room."""
    tests = {name: noted for one in rooms for name, noted in one.tests.items()}
    return Room(min(LIMIT, sum(one.limit for one in rooms)), tests)


def tested(names: tuple[str, ...], tree: Path, plan: dict[str, object], limit: float) -> int:
    """What pytest returns for these tests over the sources of `tree`."""
    tests = [str(ROOT / "tests" / "core" / name) for name in names]
    file = tree / "plan.json"
    file.write_text(json.dumps(plan), encoding="utf-8")
    command = [sys.executable, str(RUNNER), str(file), "-q", "-x", "-n", "0"]
    command += ["-p", "no:cacheprovider", "-o", f"pythonpath={tree} {ROOT}"]
    done = subprocess.run(
        [*command, *tests],
        cwd=ROOT,
        env={**os.environ, "CI": "1", "PYTHONPATH": str(tree)},
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


def with_marks(chosen: list[Mutant]) -> dict[str, str]:
    """The sources that note which of the chosen places is reached."""
    marks: dict[str, dict[int, int]] = {}
    for place, one in enumerate(chosen):
        marks.setdefault(one.file, {})[one.number] = place
    return {
        file: marked((SOURCE / file).read_text(encoding="utf-8"), numbers)
        for file, numbers in marks.items()
    }


def code_copied(source: str, target: str) -> None:
    """Copies code with its times, by which Python knows what it compiled; data is linked to."""
    if Path(source).suffix in (".py", ".pyc"):
        shutil.copy2(source, target)
    else:
        Path(target).symlink_to(source)


class Trees:
    """Copies of the sources, one for each job."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.all = [folder / str(number) for number in range(jobs)]
        self.free: Queue[Path] = Queue()
        for tree in self.all:
            shutil.copytree(SOURCE, tree / "memfit", copy_function=code_copied)
            self.free.put(tree)

    def write(self, texts: dict[str, str]) -> None:
        for tree in self.all:
            written(tree, texts)

    def lend(self, function: Callable[[Path], T]) -> T:
        tree = self.free.get()
        try:
            return function(tree)
        finally:
            self.free.put(tree)


def judge(chosen: list[Mutant], asked: argparse.Namespace) -> list[bool | None] | None:
    """Of each change whether it survives; None where tests fail without one."""
    files = {one.file for one in chosen}
    names = {file: tests_of(file, asked.quick) for file in files}
    tests = sorted({name for group in names.values() for name in group})
    lives: list[bool | None] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        trees = Trees(Path(folder), asked.jobs)
        trees.write(with_marks(chosen))
        found = pool.map(lambda name: trees.lend(lambda tree: room_of(name, tree)), tests)
        known = dict(zip(tests, found, strict=True))
        wrong = [name for name, room in known.items() if room is None]
        if wrong:
            print(f"the tests fail without a change: {', '.join(wrong)}")
            return None
        trees.write({file: plain(file) for file in files})

        def one(place: int) -> None:
            change, group = chosen[place], names[chosen[place].file]
            room = together([one for name in group if (one := known[name])])
            alive = trees.lend(lambda tree: survives(change, tree, group, room, place))
            lives.append(alive)
            if alive is not False or asked.all:
                print(report_of(change, alive), flush=True)

        try:
            list(pool.map(one, range(len(chosen))))
        except KeyboardInterrupt:
            print(f"stopped after {len(lives)} of {len(chosen)} changes")
            pool.shutdown(cancel_futures=True)
    return lives


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
    begin = time.monotonic()
    lives = judge(chosen, asked)
    if lives is None:
        return 2
    print(f"{(time.monotonic() - begin) / 60:.0f} minutes")
    return report(lives)


if __name__ == "__main__":
    sys.exit(main())
