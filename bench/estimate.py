"""One question, side by side in one run: memfit's formulas and trace, and the peers that are installed.

The question is full fine-tuning of Llama-3.1-8B, 1 × 2048 tokens, or what a peer makes of it (`accelerate estimate-memory`
and llm-analysis know less). Each row is the fastest of its runs, since these are costs, not loads; ratios are to memfit's
formulas as a whole process. Peers that are not installed are said to be missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"
MODEL = "meta-llama/Llama-3.1-8B"
JOB = {"batch": 1, "seq": 2048}

WARM = """
import sys, time
from memfit.job import Job
from memfit.lower import lower
from memfit.model.source import read
from memfit.model.families import build
from memfit.simulate.memory import memory
from memfit.simulate.replay import replay
model = build(read({model!r}, offline=True).config)
def best(run, times):
    found = []
    for index in range(times):
        job = Job(batch=1, seq=2048 - index)  # never the same question twice
        start = time.perf_counter(); run(job); found.append(time.perf_counter() - start)
    return min(found)
print(best(lambda job: memory(lower(model, job, compact=True)), 40), best(lambda job: replay(lower(model, job)), 10))
"""
ACCELERATE = """
import json, sys
from accelerate import init_empty_weights
from accelerate.utils import calculate_maximum_sizes
from transformers import AutoConfig, AutoModel
config = AutoConfig.for_model(**json.load(open(sys.argv[1])))
with init_empty_weights():
    model = AutoModel.from_config(config)
print(calculate_maximum_sizes(model))
"""
TRACE = """
import json, sys
from memfit.job import Job
from memfit.trace import trace_config
print(len(trace_config(json.load(open(sys.argv[1])), Job(batch=1, seq=2048))))
"""
TRACKER = """
import json, sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model(**json.load(open(sys.argv[1])))
config.use_cache = False
with FakeTensorMode():
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    ids = torch.zeros((1, 2048), dtype=torch.int64)
    with tracker:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SRC), "HF_HUB_OFFLINE": "1"}


def process(command: list[str], times: int) -> float | None:
    """Seconds of the fastest run; None where it does not run here."""
    best = None
    for _ in range(times):
        start = time.perf_counter()
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        taken = time.perf_counter() - start
        if done.returncode not in (0, 1) or "Traceback" in done.stderr:
            print(f"  ({' '.join(command)[:40]}…: {done.stderr.strip().splitlines()[-1:] or done.returncode})", file=sys.stderr)
            return None
        best = taken if best is None else min(best, taken)
    return best


def main() -> int:
    sys.path.insert(0, str(SRC))
    from memfit.model.source import read

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(dict(read(MODEL, offline=True).config)))
        python = sys.executable
        ask = [python, "-m", "memfit", "estimate", MODEL, "--batch", "1", "--seq", "2048", "--gpu", "h100-sxm", "--json"]
        whole = process(ask, 9)
        rows = [
            ("memfit estimate, whole process", whole),
            ("accelerate's estimator, whole process (weights only)", process([python, "-c", ACCELERATE, str(config)], 2)),
            ("memfit's trace of the real code, whole process", process([python, "-c", TRACE, str(config)], 1)),
            ("torch's MemTracker, whole process", process([python, "-c", TRACKER, str(config)], 1)),
        ]
    warm = subprocess.run([python, "-c", WARM.format(model=MODEL)], env=environment(), capture_output=True, text=True, check=True).stdout.split()
    rows[1:1] = [("  warm: live peak", float(warm[0])), ("  warm: allocator replayed over every step", float(warm[1]))]
    for name, seconds in rows:
        shown = "missing here" if seconds is None else f"{seconds * 1000:10.1f} ms" + (f"{seconds / whole:9.2f} ×" if whole else "")
        print(f"{name:<56}{shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
