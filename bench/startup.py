"""How long the package takes to import: the median of fresh processes, with Python's own start
taken off."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"
RUNS = 15


def seconds(code: str) -> float:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    return time.perf_counter() - start


def main() -> int:
    cases = {"python itself": "pass", "import memfit": "import memfit"}
    if (SRC / "memfit" / "cli.py").exists():
        cases["import memfit.cli"] = "import memfit.cli"
    for code in cases.values():
        seconds(code)  # writes the bytecode
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(RUNS):  # by turns, so that a busy moment hits every case
        for name, code in cases.items():
            taken[name].append(seconds(code))
    base = statistics.median(taken["python itself"])
    print(f"{'median of ' + str(RUNS) + ' processes':<28}{'whole':>10}{'beyond python':>16}")
    for name, values in taken.items():
        median = statistics.median(values)
        print(f"{name:<28}{median * 1000:>7.1f} ms{(median - base) * 1000:>13.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
