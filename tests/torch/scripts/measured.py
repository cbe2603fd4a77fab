"""What `memfit measure` runs on a GPU, from the first counter to the last, given a GPU that is
pretended; the answer goes to whoever asked."""

import sys
import time
from pathlib import Path

from tests.torch.pretended import ASKED, FOUND

import torch
from memfit.measure.child import run

clock = time.time_ns()


def snapshot(device: object = None) -> dict[str, object]:
    """What `torch.cuda.memory._snapshot` gives (torch 2.13), of a block that came before the first
    phase and one that comes at its end."""
    now = time.time_ns() // 1000
    frames = [{"filename": "/x/site-packages/transformers/m.py", "line": 7, "name": "forward"}]
    entries = [
        {
            "action": "segment_alloc",
            "addr": 1 << 21,
            "size": 1 << 21,
            "stream": 0,
            "time_us": clock // 1000,
            "frames": [],
        },
        {
            "action": "alloc",
            "addr": 1 << 21,
            "size": 1000,
            "stream": 0,
            "time_us": clock // 1000,
            "frames": frames,
        },
        {
            "action": "free_requested",
            "addr": 1 << 21,
            "size": 1000,
            "stream": 0,
            "time_us": now,
            "frames": [],
        },
        {
            "action": "free_completed",
            "addr": 1 << 21,
            "size": 1000,
            "stream": 0,
            "time_us": now,
            "frames": [],
        },
        {
            "action": "alloc",
            "addr": 1 << 21,
            "size": 2000,
            "stream": 0,
            "time_us": now + 1,
            "frames": [],
        },
    ]
    return {"segments": [], "device_traces": [entries]}


torch.cuda.memory._snapshot = snapshot
FOUND.append(run(ASKED[-1], "cuda", Path(sys.argv[1]) if len(sys.argv) > 1 else None))
