"""How long cards take, in seconds of the processor and until the answer: `python bench/cards.py
[--beside CHECKOUT] [MODEL …]`, with MEMFIT_PROCESSES as it is set. With another checkout both are
asked in turn, and what they print is compared. No answer is taken from disk."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GPU = "rtx-4090"
MODELS = (
    "google/gemma-4-E2B",
    "Qwen/Qwen3.5-9B",
    "ibm-granite/granite-4.0-h-tiny",
    "ibm-granite/granite-4.0-h-1b",
    "nvidia/Nemotron-H-8B-Base-8K",
    "LiquidAI/LFM2-1.2B",
    "Qwen/Qwen3-VL-4B-Instruct",
    "Qwen/Qwen2.5-VL-3B-Instruct",
    "mistralai/Ministral-3-3B-Instruct-2512",
    "HuggingFaceTB/SmolLM3-3B",
    "baidu/ERNIE-4.5-0.3B-PT",
    "meta-llama/Llama-3.1-8B",
)


def card(root: Path, model: str) -> tuple[float, float, str]:
    """Seconds of one fresh process, those until its end, and what it prints."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    begun = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "memfit", model, "--gpu", GPU, "--offline"],
        capture_output=True,
        text=True,
        check=False,
        env={**kept, "PYTHONPATH": str(root / "src"), "MEMFIT_CACHE": "off"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, time.monotonic() - begun, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT")
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    given = parser.parse_args()
    for model in given.models:
        other = None if given.beside is None else card(given.beside, model)
        seconds, wall, text = card(ROOT, model)
        line = f"{model:<42}{seconds:>8.1f} s{wall:>8.1f} s until the answer"
        if other is not None:
            line += f"{other[0]:>8.1f} s{other[1]:>8.1f} s before{seconds / other[0]:>7.2f}"
            line += "" if other[2] == text else "  the texts differ"
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
