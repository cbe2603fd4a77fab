"""How long commands take beside an older commit: seconds of the processor, by turns, on this
machine. With `--write` the table in docs/performance.md, too.

python bench/performance.py [--base COMMIT] [--runs N] [--only WORD] [--write]
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
TABLE = re.compile(r"<!-- table -->.*?<!-- end -->", re.DOTALL)
BASE = "d008702"
# Both commits have what this uses. Every length is another one, so that nothing is remembered.
WARM = """
import sys, time
from memfit.estimate import estimate
from memfit.hardware import parse_cluster
from memfit.job import Job
try:
    from memfit.words.models import model_of
    from memfit.words.options import Ask
except ImportError:  # the older commit
    from memfit.words import Ask, model_of
_, model = model_of("meta-llama/Llama-3.1-8B", Ask(offline=True))
cluster, precise = parse_cluster("rtx-4090"), sys.argv[1] == "precise"
taken = []
for number in range(int(sys.argv[2])):
    job = Job(method="lora", checkpointing="full", batch=1, seq=1024 + 64 * number)
    begun = time.process_time()
    estimate(model, job, cluster, precise=precise)
    taken.append(time.process_time() - begun)
print(sorted(taken)[len(taken) // 2])
"""


class Row(NamedTuple):
    """`then`: the words that ask the older commit for the same, where they were others."""

    name: str
    words: tuple[str, ...]
    limit: float
    runs: int = 3
    then: tuple[str, ...] = ()
    warm: bool = False


LORA = ("--method", "lora", "--framework", "transformers", "--checkpointing", "full")
H100 = ("--seq", "4096", "--global-batch", "64")
MANY = ("--seq", "4096", "--global-batch", "1024")
LOOP = ("--framework", "transformers")
PLAN = ("plan", "llama-3.1-8b", "--gpus")
ROWS = (
    Row("`memfit --version`", ("--version",), 1.0, 9),
    Row(
        "`memfit estimate`, LoRA of 8B",
        ("estimate", "llama-3.1-8b", *LORA, "--gpu", "rtx-4090"),
        0.6,
        9,
    ),
    Row("warm: a precise estimate of it, other lengths", ("precise", "15"), 0.12, 3, warm=True),
    Row("warm: its live peak alone", ("quick", "60"), 0.1, 3, warm=True),
    Row("`memfit plan` on 8 × H100", (*PLAN, "8xh100-sxm", *H100), 0.25),
    Row(
        "the same of a loop by hand",
        (*PLAN, "8xh100-sxm", *H100, *LOOP),
        0.25,
        then=(*PLAN, "8xh100-sxm", *H100),
    ),
    Row("`memfit plan` on 1,024 × H100", (*PLAN, "128x8xh100-sxm", *MANY), 0.15, 1),
    Row(
        "`memfit study` on 8 × A100", ("study", "llama-3.1-8b", "--gpus", "8xa100-sxm-80gb"), 0.3, 1
    ),
    Row(
        "`memfit plan --task inference` on 2 × 4090",
        (*PLAN, "2xrtx-4090", "--task", "inference"),
        0.2,
        1,
    ),
)


def seconds(source: Path, row: Row, words: tuple[str, ...]) -> float:
    """Of one fresh process, or what a warm one says of itself."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PYTHONPATH": str(source / "src"), "HF_HUB_OFFLINE": "1"}
    program = ["-c", WARM] if row.warm else ["-m", "memfit"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *program, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):  # 1: it does not fit
        sys.exit(f"{source}: {' '.join(words)}: {done.stderr[-400:]}")
    if row.warm:
        return float(done.stdout)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(base: Path, row: Row, runs: int) -> str:
    """A line of the table; the first run of each writes bytecode and counts for nothing."""
    then, now = [], []
    for _ in range(runs + (row.runs > 1)):
        then.append(seconds(base, row, row.then or row.words))
        now.append(seconds(ROOT, row, row.words))
    old, new = (statistics.median(some[-runs:]) for some in (then, now))
    print(
        f"{row.name:<48}{old:9.3f} s{new:9.3f} s{new / old:8.2f}  (wanted {row.limit})", flush=True
    )
    return f"| {row.name} | {figure(old)} | {figure(new)} | {new / old:.2f} | {row.limit:g} |"


def figure(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", default=BASE)
    parser.add_argument("--runs", type=int, default=0, help="of each row (0: the row's own)")
    parser.add_argument("--only", default="", help="rows with this word in their name")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    rows = [row for row in ROWS if given.only in row.name]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", tree, given.base], cwd=ROOT, check=True
        )
        try:
            lines = [measured(tree, row, given.runs or row.runs) for row in rows]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    if given.write:
        head = (
            f"On {datetime.now(UTC).date()}, Python {platform.python_version()}, "
            f"{os.cpu_count()} cores ({platform.machine()}); seconds of the processor.\n\n"
            f"| what | {given.base} | now | ratio | wanted |\n|---|---|---|---|---|\n"
        )
        table = "<!-- table -->\n" + head + "\n".join(lines) + "\n<!-- end -->"
        PAGE.write_text(TABLE.sub(lambda _: table, PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
