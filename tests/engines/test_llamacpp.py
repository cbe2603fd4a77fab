"""memfit's buffers against those that llama.cpp itself allocates on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.engines.llamacpp_models import (
    CASES,
    EMBEDDERS,
    ENCODERS,
    PARTLY_LOADED,
    SMALL,
    WIDE,
    small,
    write,
)

from memfit.serving.llamacpp.memory import buffers
from memfit.serving.llamacpp.placement import BACKENDS, HOST, Machine
from memfit.serving.llamacpp.settings import Settings
from memfit.units import MIB

pytest.importorskip("xllamacpp")
pytest.importorskip("gguf")

ON, OFF = "ENABLED", "DISABLED"
CPU = Machine(backend=BACKENDS["cpu"])


@dataclass(frozen=True, kw_only=True)
class Run:
    """The same settings for memfit and for llama.cpp, over models of one size."""

    ours: Settings
    theirs: dict[str, Any]
    base: dict[str, Any] = field(default_factory=lambda: SMALL)


RUNS = {
    "flash": Run(
        ours=Settings(context=1024, parallel=1, unified=False),
        theirs={"n_ctx": 1024, "flash_attn_type": ON},
    ),
    "scores": Run(
        ours=Settings(context=1024, flash=False, parallel=2),
        theirs={"n_ctx": 1024, "flash_attn_type": OFF, "n_parallel": 2},
    ),
    "scores of one slot": Run(
        ours=Settings(context=512, flash=False),
        theirs={"n_ctx": 512, "flash_attn_type": OFF},
    ),
    "small batches": Run(
        ours=Settings(context=768, ubatch=128, parallel=4, unified=True),
        theirs={
            "n_ctx": 768,
            "n_ubatch": 128,
            "n_parallel": 4,
            "kv_unified": True,
            "flash_attn_type": ON,
        },
    ),
    "wide": Run(
        ours=Settings(context=1024),
        theirs={"n_ctx": 1024, "flash_attn_type": ON},
        base=WIDE,
    ),
}


def kinds(run: Run) -> list[str]:
    return [one for one in CASES if run.ours.streams == 1 or one not in ENCODERS]


def logs(run: Run, folder: Path) -> dict[str, str]:
    """The log of each architecture, from one process that loads all files, and one for each that
    llama-server stops with."""
    alone = [one for one in kinds(run) if one in ENCODERS]
    found = loaded(run, [one for one in kinds(run) if one not in alone], folder)
    for kind in alone:
        for _ in range(TRIES):
            found |= loaded(run, [kind], folder)
            if "compute" in printed(found[kind]):
                break
    return found


TRIES = 8  # the thread that writes the log may not be through when llama-server stops


def loaded(run: Run, some: list[str], folder: Path) -> dict[str, str]:
    lines = []
    for kind in some:
        path = folder / f"{kind}.gguf"
        write(small(kind, run.base), path)
        settings = {**run.theirs, "embedding": kind in EMBEDDERS}
        if kind in PARTLY_LOADED:
            settings["load_mode"] = "NONE"
        lines.append(json.dumps({"path": str(path), "settings": settings}))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("llamacpp_process.py"))],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )
    parts = re.split(r"load_model: loading model '.*/(.*)\.gguf'", done.stderr)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def printed(log: str) -> dict[str, float]:
    """MiB by what fills them."""
    found = re.findall(r"(model|KV|RS|compute|output) buffer size =\s+([\d.]+)", log)
    sums: dict[str, float] = {}
    for what, size in found:
        sums[what] = sums.get(what, 0.0) + float(size)
    return sums


def computed(kind: str, run: Run) -> dict[str, float]:
    held = buffers(small(kind, run.base), run.ours, CPU)
    return {
        "model": held.model[HOST] / MIB,
        "KV": (held.kv.get(HOST, 0) + held.kv_window.get(HOST, 0)) / MIB,
        "RS": held.state.get(HOST, 0) / MIB,
        "compute": held.compute[HOST] / MIB,
        "output": held.output / MIB,
    }


# The log rounds each buffer to 0.01 MiB; a file's mapping begins and ends at its tensors.
ROUNDED = {"model": 0.02, "KV": 0.011, "RS": 0.011, "compute": 0.0051, "output": 0.0051}


@pytest.mark.parametrize("name", RUNS)
def test_buffers_are_those_of_llamacpp(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    found = logs(run, tmp_path)
    assert set(found) == set(kinds(run))
    wrong = []
    for kind, log in found.items():
        theirs, ours = printed(log), computed(kind, run)
        if "compute" not in theirs:
            wrong.append(f"{kind}: llama.cpp does not load it: {log[-400:]}")
            continue
        wrong += [
            f"{kind} {what}: {ours[what]:.3f} and llama.cpp {theirs.get(what, 0.0):.2f}"
            for what, error in ROUNDED.items()
            if abs(ours[what] - theirs.get(what, 0.0)) > error
        ]
    assert not wrong
