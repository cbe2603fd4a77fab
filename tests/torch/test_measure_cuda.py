"""The half of `memfit measure` that needs a GPU, run whole on one that is pretended: every call to
`torch.cuda` is made, every counter read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.torch.pretended import pretended
from tests.torch.test_measure_kinds import CONFIG

import torch
from memfit.hardware import find_gpu
from memfit.job import Job
from memfit.measure import history
from memfit.measure.compare import predicted
from memfit.measure.meter import CudaMeter
from memfit.measure.record import Case, record_of
from memfit.measure.run import recorded
from memfit.simulate.memory import memory
from memfit.simulate.replay import replay
from memfit.tape import Alloc, Mark
from memfit.trace import cuda, trace_config

SCRIPT = Path(__file__).parent / "scripts" / "measured.py"
GPU = find_gpu("a100-sxm-80gb")
pytestmark = pytest.mark.filterwarnings("ignore")
JOBS: dict[str, dict[str, Any]] = {
    "full": {"precision": "bf16", "seq": 64, "batch": 2},
    "lora": {
        "precision": "autocast-bf16",
        "seq": 64,
        "batch": 2,
        "method": "lora",
        "checkpointing": "full",
    },
    "generate": {"task": "inference", "seq": 64, "new_tokens": 5},
}


def case_of(job: dict[str, Any], **other: Any) -> Case:
    return Case(model="tiny", config=CONFIG, job=Job(**job), **other)


def measured(case: Case, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    device = cuda.Device(name=GPU.name, memory=GPU.memory, sms=GPU.sms, capability=GPU.sm)
    found = pretended(
        case,
        script=str(SCRIPT),
        arguments=arguments,
        device=device,
        steps=0,
        scratch=str(tmp_path / "scratch"),
    )
    assert found["result"] == "ok", found.get("error")
    return found


@pytest.mark.parametrize("name", JOBS)
def test_counters_of_a_pretended_gpu_are_those_of_the_trace(name: str, tmp_path: Path) -> None:
    case = case_of(JOBS[name])
    made = recorded(case, measured(case, tmp_path), 1.0)
    assert record_of(json.loads(json.dumps(dataclasses.asdict(made))), "here") == made
    tape = trace_config(CONFIG, case.job, gpu=GPU, decode_all=True, steps=3)
    expected = memory(tape, replay(tape))
    assert made.allocated is not None
    assert expected.reserved is not None
    assert made.reserved is not None
    assert abs(made.allocated / expected.allocated - 1) < 0.01
    assert abs(made.reserved / expected.reserved - 1) < 0.05
    assert made.total == GPU.memory
    assert made.gpu == GPU.name
    said = predicted(made)
    assert said is not None
    assert said.by == "formulas"


def test_the_allocators_history_becomes_a_tape(tmp_path: Path) -> None:
    """In the format of torch's snapshots: who asked is the innermost line of Python, and phases
    begin where the meter marked them."""
    (tmp_path / "scratch").mkdir()
    found = measured(
        case_of(JOBS["full"], history=True), tmp_path, str(tmp_path / "scratch" / "e.json.gz")
    )
    assert found["events"] == "e.json.gz"
    tape = history.read(next((tmp_path / "scratch").rglob("*e.json.gz")))
    blocks = [one for one in tape if isinstance(one, Alloc)]
    assert [(one.size, one.op) for one in blocks] == [
        (1000, "transformers/m.py:7 forward"),
        (2000, ""),
    ]
    marks = [one.phase for one in tape if isinstance(one, Mark)]
    assert marks.count("forward") == 3
    assert tape.events[0] == blocks[0]  # before the first phase
    assert tape.events[-1] == blocks[1]


def test_vllm_by_its_own_signatures(tmp_path: Path) -> None:
    """The stand-in's cache fills the share of the GPU that it is told, which the counters see."""
    case = case_of(
        {"task": "inference", "seq": 16, "batch": 3, "new_tokens": 4},
        engine="vllm,gpu_memory_utilization=0.5",
    )
    made = recorded(case, measured(case, tmp_path), 1.0)
    assert made.allocated is not None
    assert 0 <= made.allocated - GPU.memory // 2 <= 2**21  # a whole number of pages
    assert [one.phase for one in made.phases] == ["load", "prefill", "decode"]
    assert made.engine == "vllm,gpu_memory_utilization=0.5"
    assert record_of(json.loads(json.dumps(dataclasses.asdict(made))), "here") == made


class Full:
    """A GPU on which nothing fits: `torch.cuda` as a meter sees it, whose counters go on working
    after an OOM."""

    def __getattr__(self, name: str) -> Any:
        return {
            "synchronize": lambda device: None,
            "reset_peak_memory_stats": lambda device: None,
            "max_memory_allocated": lambda device: 700,
            "max_memory_reserved": lambda device: 800,
            "memory_stats": lambda device: {"num_alloc_retries": 1},
            "get_device_properties": lambda device: GPU,
        }[name]


def test_an_oom_says_what_was_asked_for_and_what_was_free() -> None:
    """torch's own words (2.13 c10/cuda/CUDACachingAllocator.cpp), and the phase that it came in."""
    from memfit.measure.child import failure

    text = (
        "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of "
        "79.25 GiB of which 1.10 GiB is free. Process 7 has "
        "78.14 GiB memory in use. Of the allocated memory 76.03 GiB is allocated by "
        "PyTorch, and 1.32 GiB is reserved by PyTorch but unallocated."
    )
    said = failure(torch.OutOfMemoryError(text))
    assert (said["result"], said["asked"], said["free"]) == (
        "oom",
        int(1.96 * 2**30),
        int(1.10 * 2**30),
    )
    meter = CudaMeter(torch.device("cpu"), Full(), lambda: 900)
    meter.mark("forward")
    meter.close()
    assert [(one.phase, one.allocated, one.reserved) for one in meter.peaks] == [
        ("forward", 700, 800)
    ]
    assert meter.device_peak == 900
