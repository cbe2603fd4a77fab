"""How long an answer takes: as a whole process, and in a warm one with and without the allocator's
replay. Medians."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SRC))
MODEL, GPU = "meta-llama/Llama-3.1-8B", "h100-sxm"
WARM = 300  # runs of what takes two milliseconds: a machine has its slow moments
START = "import sys; from memfit.cli import main; sys.exit(main())"


def median(action: Callable[[], object], runs: int) -> float:
    action()  # bytecode, caches
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def process(*arguments: str) -> Callable[[], object]:
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
    } | {"PYTHONPATH": str(SRC)}
    return lambda: subprocess.run(
        [sys.executable, "-c", START, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        check=False,
    )


def additions(count: int) -> int:
    """A yardstick: 40 to 50 ms where nothing else runs on a core of 2023."""
    total = 0
    for number in range(count):
        total += number
    return total


def main() -> int:
    from memfit.estimate import estimate
    from memfit.hardware import parse_cluster
    from memfit.job import Job
    from memfit.lower import lower
    from memfit.simulate.memory import memory
    from memfit.simulate.replay import replay
    from memfit.words.models import model_of
    from memfit.words.options import Ask

    _, model = model_of(MODEL, Ask(offline=True))
    cluster, job = parse_cluster(GPU), Job()
    others = iter(
        [Job(batch=1 + number % 4, seq=1024 + 8 * number) for number in range(WARM + 1)]
    )  # so that no answer can be remembered
    compact, flat = lower(model, job, None, cluster, compact=True), lower(model, job, None, cluster)
    rows: dict[str, tuple[Callable[[], object], int]] = {
        "a million additions in a loop (what this machine is worth)": (
            lambda: additions(1_000_000),
            9,
        ),
        "estimate() warm, live peak only, another batch and length each time": (
            lambda: estimate(model, next(others), cluster, precise=False),
            WARM,
        ),
        "estimate() warm, live peak only": (
            lambda: estimate(model, job, cluster, precise=False),
            WARM,
        ),
        "  of which lower, compact": (lambda: lower(model, job, None, cluster, compact=True), WARM),
        f"  of which memory, {len(compact)} events": (lambda: memory(compact), WARM),
        "estimate() warm, allocator replayed": (lambda: estimate(model, job, cluster), 9),
        "  of which lower, flat": (lambda: lower(model, job, None, cluster), 9),
        f"  of which replay, {len(flat)} events": (lambda: replay(flat), 9),
        "memfit --version, whole process": (process("--version"), 9),
        f"memfit estimate {MODEL}, whole process": (process("estimate", MODEL, "--gpu", GPU), 9),
    }
    for name, (action, runs) in rows.items():
        print(f"{name:<72}{median(action, runs) * 1000:>8.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
