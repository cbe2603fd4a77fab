"""Runs a script on the CPU as `python script.py` would, and prints its peaks of live bytes: outside
the optimizer's steps, whose temporaries are a GPU's, and of all."""

import contextlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from tests.torch.watch import Watch
from torch.optim import optimizer

watch = Watch()


def phase(name: str) -> Any:
    def set_phase(*_: Any) -> None:
        watch.phase = name

    return set_phase


optimizer.register_optimizer_step_pre_hook(phase("optimizer"))
optimizer.register_optimizer_step_post_hook(phase("step"))
script, *arguments = sys.argv[1:]
sys.argv = [script, *arguments]
sys.path.insert(0, str(Path(script).parent))
with watch, contextlib.suppress(SystemExit):
    runpy.run_path(script, run_name="__main__")
peaks = {name: one for name, one in watch.peaks.items() if name != "optimizer"}
sys.stdout.write(f"\npeak of rank {os.environ.get('RANK', 0)}: {max(peaks.values())}\n")
