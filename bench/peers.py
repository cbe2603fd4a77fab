"""How long a whole process of memfit takes beside the peers that answer a similar question: LoRA of
Llama-3.1-8B. The limits are 0.5 of fitcheck's time and 0.1 of `accelerate estimate-memory`'s.

python bench/peers.py [--fitcheck PATH]   (`pip install fitcheck-llm` into another environment)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"
MODEL = "meta-llama/Llama-3.1-8B"
RUNS = 9
LIMITS = {"fitcheck": 0.5, "accelerate estimate-memory": 0.1}


def hub(folder: Path) -> None:
    """A cache as huggingface_hub keeps it, with the config alone: nobody asks the network."""
    from memfit.model import catalog

    entry = next(entry for entry in catalog.entries() if entry.name == MODEL)
    home = folder / "hub" / f"models--{MODEL.replace('/', '--')}"
    snapshot = home / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps(dict(entry.config())))


def seconds(command: list[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    taken = time.perf_counter() - start
    if done.returncode not in (0, 1):  # 1: it does not fit
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-400:]}")
    return taken


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fitcheck", default="", help="the command of that environment")
    given = parser.parse_args()
    python = sys.executable
    commands = {
        "python -c pass": [python, "-c", "pass"],
        "memfit estimate": [
            *(python, "-m", "memfit", "estimate", MODEL, "--method", "lora"),
            *("--framework", "transformers", "--checkpointing", "full", "--gpu", "rtx-4090"),
        ],
        "accelerate estimate-memory": [
            *(python, "-m", "accelerate.commands.accelerate_cli", "estimate-memory", MODEL),
            *("--library_name", "transformers"),
        ],
    }
    if given.fitcheck:
        commands["fitcheck"] = [given.fitcheck, MODEL, "--grad-checkpoint", "--gpu", "4090"]
    sys.path.insert(0, str(SRC))
    with tempfile.TemporaryDirectory() as folder:
        hub(Path(folder))
        own = {"HF_HOME": folder, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(SRC)}
        environment = {**os.environ, **own}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as installed packages have it
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(RUNS):  # by turns, so that a busy moment hits every command
            for name, command in commands.items():
                taken[name].append(seconds(command, environment))
    ours = statistics.median(taken["memfit estimate"])
    print(f"{f'median of {RUNS} processes':<30}{'whole':>10}{'memfit / it':>14}{'limit':>8}")
    for name, values in taken.items():
        median, limit = statistics.median(values), LIMITS.get(name)
        shown = f"{limit:>8}" if limit else ""
        print(f"{name:<30}{median * 1000:>7.0f} ms{ours / median:>14.2f}{shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
