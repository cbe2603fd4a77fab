"""Starts the process of a case, waits for it, and makes a Record of what it says, or of how it
ended."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.errors import InputError, Problem
from memfit.measure.child import PREFIX
from memfit.measure.record import Case, Peak, Record, write
from memfit.model.families import build
from memfit.model.modules import Attention
from memfit.parallel.pipeline.check import micro_batches

COUNTED = {"cuda": "cuda", "cpu": "profiler"}  # whose figures a device's are


def measure(
    case: Case, folder: Path | None = None, *, device: str = "", limit: float = 600.0
) -> Record:
    """Run one case; with a folder, its record is written there. OOM, a timeout and a failure are
    results, too."""
    began = time.monotonic()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    events = (
        folder / case.file.replace(".json", ".events.json.gz")
        if folder is not None and case.history
        else None
    )
    asked = {
        "case": {**vars(case), "config": dict(case.config), "job": dataclasses.asdict(case.job)},
        "device": device or device_here(),
        "events": str(events) if events else "",
    }
    answer = finished(asked, case.job.alloc_conf, limit)
    record = recorded(case, answer, time.monotonic() - began)
    if folder is not None:
        write(record, folder / case.file)
    return record


def finished(asked: Mapping[str, Any], alloc_conf: str, limit: float) -> dict[str, Any]:
    environment = dict(
        os.environ, PYTHONUNBUFFERED="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
    )
    if alloc_conf:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = environment["PYTORCH_ALLOC_CONF"] = alloc_conf
    command = [sys.executable, "-m", "memfit.measure.child"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=limit,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {
            "result": "timeout",
            "error": f"not finished after {limit:.0f} s",
            "by": COUNTED[asked["device"]],
        }
    lines = [line for line in done.stdout.splitlines() if line.startswith(PREFIX)]
    if lines:
        found: dict[str, Any] = json.loads(lines[-1][len(PREFIX) :])
        if "problems" in found:
            raise InputError(*(Problem(**one) for one in found["problems"]))
        return found
    last = next(
        (line for line in reversed(done.stderr.splitlines()) if line.strip()), "nothing said"
    )
    message = f"the process ended with {done.returncode}: {last.strip()}"[:400]
    return {"result": "error", "error": message, "by": COUNTED[asked["device"]]}


def recorded(case: Case, answer: Mapping[str, Any], whole: float) -> Record:
    phases = tuple(Peak(**one) for one in answer.get("phases", ()))
    steps = step_seconds(phases)
    per_second = rate(case, phases, steps) if answer.get("result") == "ok" else None
    return Record(
        case=case.name,
        model=case.model,
        config=case.config,
        job=case.changes,
        use=case.use,
        rank=case.rank,
        world=case.strategy.ranks,
        **{**answer, "phases": phases},
        step_seconds=steps,
        tokens_per_second=per_second,
        seconds=whole,
        flops_per_second=None if per_second is None else per_second * per_token(case),
    )


def rate(case: Case, phases: tuple[Peak, ...], steps: tuple[float, ...]) -> float | None:
    """Tokens that pass through this rank in a second: of steps but the first, of what is generated
    behind the first token, or of a prompt alone."""
    job, strategy = case.job, case.strategy
    if job.training:
        steady = steps[1:] or steps
        seconds = sum(steady) / len(steady) if steady else 0.0
        batches = job.accumulate if strategy.pp is None else micro_batches(strategy.pp, job)
        tokens = job.batch * batches * job.seq // strategy.size("cp")
    else:
        phase, length = (
            ("decode", job.new_tokens - 1) if job.new_tokens > 1 else ("prefill", job.seq)
        )
        seconds = sum(one.seconds for one in phases if one.phase == phase)
        tokens = job.batch * length
    return tokens / seconds if seconds else None


def per_token(case: Case) -> int:
    """Operations of the model for one token (Chowdhery et al., PaLM, appendix B): 2 for each weight
    that multiplies and 4·L·H·N·T for attention going forward, twice that for gradients of weights
    and inputs; with frozen weights only those of inputs. What an embedding looks up is none. Of a
    rank that shares the matrices or the layers: its part."""
    try:
        model = build(case.config)
    except InputError:
        return 0
    job = case.job
    looked_up = sum(weight.count for module in model.embed for weight in module.weights())
    weights = (
        model.active - looked_up + (model.head.inputs * model.head.outputs if model.tied else 0)
    )
    mixers = [
        block.mixer
        for layer in model.layers
        for block in layer.blocks
        if isinstance(block.mixer, Attention)
    ]
    tokens = job.seq if job.training else job.seq + job.new_tokens
    forward = 2 * weights + sum(4 * mixer.heads * mixer.head * tokens for mixer in mixers)
    passes = 1 if not job.training else 3 if job.method == "full" else 2
    return passes * forward // (case.strategy.size("tp") * case.strategy.size("pp"))


def step_seconds(phases: tuple[Peak, ...]) -> tuple[float, ...]:
    """How long each step took: its forward, backward and optimizer together."""
    sums: dict[int, float] = {}
    for one in phases:
        if one.phase in ("forward", "backward", "step"):
            sums[one.step] = sums.get(one.step, 0.0) + one.seconds
    return tuple(sums.values())


def device_here() -> str:
    """Asked of a process of its own: torch is not loaded here, and a context would cost the GPU
    memory that is to be measured."""
    code = "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError.one(
            "measuring needs torch", hint="install the extra: `pip install memfit[measure]`"
        )
    return done.stdout.strip()
