"""How long a trace of the real code takes and what it needs: a full training step of 8B, 70B and a
671B mixture of experts, each in a fresh process, and torch's own MemTracker on the 8B beside it. On
a busy machine the seconds of CPU say more.

Usage: python bench/trace.py [8B|70B|671B|memtracker ...]"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SRC))
MODELS = {
    "8B": "meta-llama/Llama-3.1-8B",
    "70B": "meta-llama/Llama-3.1-70B",
    "671B": "deepseek-ai/DeepSeek-V3",
}
CASES = (*MODELS, "memtracker")
BATCH, SEQ = 1, 4096


def config_of(case: str) -> dict[str, object]:
    from memfit.model import catalog

    return dict(catalog.entry(catalog.find(MODELS[case]) or MODELS[case]).config())


Row = tuple[
    tuple[float, float], int, str
]  # seconds after the imports (waited, computed), the live peak, what it was


def clock() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - start[0], time.process_time() - start[1]


def by_trace(case: str) -> Row:
    import peft  # noqa: F401 - whatever a trace imports is imported before the clock starts
    import transformers  # noqa: F401

    from memfit.job import Job
    from memfit.simulate.memory import memory
    from memfit.trace import program

    config, job = config_of(case), Job(batch=BATCH, seq=SEQ, precision="bf16")
    start = clock()
    tape = program.run(config, job, program.Options(steps=1))
    seconds = since(start)
    return seconds, memory(tape).allocated, f"{len(tape)} events"


def by_memtracker() -> Row:
    """The same step under torch's tracker, on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import AutoConfig, AutoModelForCausalLM

    import torch

    values = {
        key: value
        for key, value in config_of("8B").items()
        if key not in ("model_type", "dtype", "torch_dtype")
    }
    config = AutoConfig.for_model("llama", **values)
    start = clock()
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.config.use_cache = False
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        ids = torch.randint(0, config.vocab_size, (BATCH, SEQ))
        with tracker:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    seconds = since(start)
    peak = tracker.get_tracker_snapshot("peak")
    return (
        seconds,
        sum(max(parts.values()) for parts in peak.values()),
        f"torch {torch.__version__}",
    )


def child(case: str) -> int:
    seconds, peak, what = by_memtracker() if case == "memtracker" else by_trace(case)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    print(json.dumps({"seconds": seconds, "peak": peak, "what": what, "rss": rss}))
    return 0


def computed() -> float:
    """Seconds of the processors in all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.1f} s ({pair[1]:.1f} s CPU)"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--child"]:
        return child(arguments[1])
    unknown = [one for one in arguments if one not in CASES]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(CASES)}", file=sys.stderr)
        return 2
    print(
        f"one training step, full bf16, AdamW, {BATCH} x {SEQ} tokens; load of this "
        f"machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    print(
        f"{'case':<12}{'after imports':>22}{'whole process':>22}{'peak RSS':>12}{'live peak':>14} "
        " what"
    )
    for case in arguments or CASES:
        start, used = time.perf_counter(), computed()
        done = subprocess.run(
            [sys.executable, __file__, "--child", case], capture_output=True, text=True, check=False
        )
        whole = time.perf_counter() - start, computed() - used
        if done.returncode:
            print(f"{case:<12} failed: {(done.stderr.strip().splitlines() or [''])[-1][:200]}")
            return 1
        row = json.loads(done.stdout.splitlines()[-1])
        size, peak = f"{row['rss'] / 2**30:.2f} GiB", f"{row['peak'] / 2**30:.2f} GiB"
        print(
            (
                f"{case:<12}{seconds(row['seconds']):>22}{seconds(whole):>22}{size:>12}{peak:>14} "
                f" {row['what']}"
            ),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
