"""`python -m memfit.measure.child`: one case, read from stdin, run to its end; the last line of
stdout is its record.

A fresh process for every case: what an earlier one left cached, or compiled, or broken, measures
nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.job import Job
from memfit.measure.record import Case

PREFIX = "RECORD "
LIBRARIES = ("peft", "accelerate", "bitsandbytes", "trl", "liger-kernel", "vllm")
EVENTS = 2_000_000
_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_FREE = re.compile(r"([\d.]+) (bytes|KiB|MiB|GiB) (?:is )?free")  # torch 2.1 and newer; before
_HOST = re.compile(r"you tried to allocate (\d+) bytes")  # c10/core/impl/alloc_cpu.cpp
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def main() -> int:
    asked = json.load(sys.stdin)
    case = Case(
        **{**asked["case"], "job": Job(**asked["case"]["job"]), "use": tuple(asked["case"]["use"])}
    )
    try:
        answer = run(case, asked["device"], Path(asked["events"]) if asked["events"] else None)
    except InputError as bad:
        answer = {"problems": [dataclasses.asdict(problem) for problem in bad.problems]}
    # The answer to the process that started this one
    print(PREFIX + json.dumps(answer), flush=True)  # noqa: T201
    return 0


def run(case: Case, kind: str, events: Path | None) -> dict[str, Any]:
    import torch
    from memfit.measure import history
    from memfit.measure.meter import CudaMeter, meter_of

    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    meter = meter_of(device)
    found: dict[str, Any] = {
        "versions": versions(torch),
        "by": "cuda" if kind == "cuda" else "profiler",
        "device": {},
    }
    if isinstance(meter, CudaMeter):
        note(found, "before", meter.used())  # first: whatever else is asked may make a context
        found["gpu"] = torch.cuda.get_device_name(device)
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
        note(found, "context", meter.used())
    if case.history and kind == "cuda":
        remember(torch)
    try:
        from memfit.measure import loops, serving

        found |= (serving if case.engine else loops).perform(case, device, meter)
        meter.close()
        found["result"] = "ok"
    except InputError:
        meter.stop()
        raise
    except Exception as problem:  # noqa: BLE001 - whatever ends a run is its result
        found |= failure(problem)
        with contextlib.suppress(Exception):
            meter.close()  # the phase that it ended in
    found |= meter.figures()
    found["phases"] = [vars(peak) for peak in meter.peaks]
    if isinstance(meter, CudaMeter):
        note(found, "peak", meter.device_peak)
        note(found, "after", meter.used())
    if case.history and events is not None:
        try:
            history.write(meter.tape(), events)
            found["events"] = events.name
        except Exception as problem:  # noqa: BLE001 - the figures are there all the same
            found["error"] = (
                f"{found.get('error', '')} the events were not kept: "
                f"{type(problem).__name__}: {problem}"
            ).strip()[:500]
    return found


def note(found: dict[str, Any], what: str, used: int | None) -> None:
    if used:
        found["device"][what] = used


def failure(problem: Exception) -> dict[str, Any]:
    """An OOM says how much was asked for and how much was free."""
    text = " ".join(str(problem).split())
    out = (
        "OutOfMemory" in type(problem).__name__
        or "out of memory" in text
        or isinstance(problem, MemoryError)
    )
    said = {"asked": _ASKED.search(text), "free": _FREE.search(text)} if out else {}
    told: dict[str, Any] = {
        name: int(float(found[1]) * UNITS[found[2]])
        for name, found in said.items()
        if found is not None
    }
    host = _HOST.search(text)
    if host is not None:
        out, told = True, {"asked": int(host[1]), "free": free_of_host()}
    return {
        "result": "oom" if out else "error",
        "error": f"{type(problem).__name__}: {text}"[:500],
        **told,
    }


def free_of_host() -> int | None:
    """What the machine, or a limit on this process (`ulimit -v`), leaves: Linux says both."""
    try:
        import resource

        held = (
            int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            * resource.getpagesize()
        )
        rows = (
            row.split() for row in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        )
        left = next(int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:")
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return left if limit == resource.RLIM_INFINITY else max(0, min(left, limit - held))
    except (ImportError, OSError, StopIteration, ValueError):
        return None


def remember(torch: Any) -> None:
    """From here on CUDA's allocator keeps its events, each with the lines of Python that asked: two
    microseconds apiece."""
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=EVENTS)


def versions(torch: Any) -> dict[str, str]:
    import importlib.metadata

    import transformers

    found = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda or "",
    }
    for library in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[library] = importlib.metadata.version(library)
    return found


if __name__ == "__main__":
    sys.exit(main())
