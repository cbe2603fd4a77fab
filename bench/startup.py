"""How long memfit takes to start: medians of fresh processes, beside Python's own start. The limit
is 6 times `python -c pass` for `memfit --version`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"
RUNS = 25
JOB = ("estimate", "llama-3.1-8b", "--method", "lora", "--checkpointing", "full", "--gpu")
CASES = {
    "python -c pass": ("-c", "pass"),
    "memfit --version": ("-m", "memfit", "--version"),
    "import memfit": ("-c", "import memfit"),
    "import memfit.cli": ("-c", "import memfit.cli"),
    "memfit --help": ("-m", "memfit", "--help"),
    "memfit estimate": ("-m", "memfit", *JOB, "rtx-4090"),
}


def seconds(arguments: tuple[str, ...]) -> float:
    """One fresh process, with its bytecode written as an installed package has it."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        check=False,
        env={**kept, "PYTHONPATH": str(SRC)},
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def main() -> int:
    for arguments in CASES.values():
        seconds(arguments)  # writes the bytecode
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(RUNS):  # by turns, so that a busy moment hits every case
        for name, arguments in CASES.items():
            taken[name].append(seconds(arguments))
    base = statistics.median(taken["python -c pass"])
    print(f"{f'median of {RUNS} processes':<28}{'whole':>12}{'of python':>12}")
    for name, values in taken.items():
        median = statistics.median(values)
        print(f"{name:<28}{median * 1000:>9.1f} ms{median / base:>10.1f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
