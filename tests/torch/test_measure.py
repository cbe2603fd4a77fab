"""Real runs in fresh processes, on this machine's CPU: records that the trace must foretell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.job import Job
from memfit.measure.campaign import read, run
from memfit.measure.child import run as child
from memfit.measure.compare import of_folder, predicted
from memfit.measure.record import Case, Record, records, write
from memfit.measure.run import measure, recorded

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
EXACT = 0.0005  # what torch and Python hold on their own account: some hundred bytes
CAMPAIGN = """
[[cases]]
models = ["low"]
value = 1
jobs = [{ task = "inference", seq = 32, new_tokens = 5 }]
[[cases]]
models = ["high"]
value = 2
jobs = [{ seq = 32, batch = 2, method = "lora" }]
"""


def case(**options: Any) -> Case:
    job = {name: options.pop(name) for name in list(options) if name in Job.__dataclass_fields__}
    return Case(
        model="tiny", config=CONFIG, job=Job(**{"precision": "fp32", "seq": 64, **job}), **options
    )


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 2},
        {"checkpointing": "full", "method": "lora"},
        {"task": "inference", "new_tokens": 5},
    ],
    ids=lambda options: ",".join(options),
)
def test_a_run_holds_what_the_trace_foretells(options: dict[str, Any]) -> None:
    found = measure(case(**options), device="cpu")
    assert found.result == "ok", found.error
    expected = predicted(found)
    assert expected is not None
    assert found.allocated is not None
    assert abs(expected.allocated / found.allocated - 1) < 0.005
    assert {one.phase for one in found.phases} >= (
        {"forward", "backward", "step"} if found.step_seconds else {"prefill", "decode"}
    )
    assert found.tokens_per_second
    assert found.versions["torch"]


def test_one_rank_of_several_holds_its_share() -> None:
    whole, share = (measure(case(use=use), device="cpu") for use in ((), ("fsdp=4",)))
    assert share.result == "ok", share.error
    held = {
        record.world: min(one.allocated for one in record.phases if one.step == 2)
        for record in (whole, share)
    }
    assert held[4] < 0.6 * held[1]


@pytest.mark.parametrize("use", ["ddp=4", "fsdp=4"])
def test_a_rank_holds_what_the_trace_foretells(use: str) -> None:
    """torch's own wrappers over a group that sends nothing, on real tensors."""
    found = measure(case(use=(use,), batch=2), device="cpu")
    assert found.result == "ok", found.error
    assert (found.use, found.world) == ((use,), int(use.partition("=")[2].partition(",")[0]))
    expected = predicted(found)
    assert expected is not None
    assert found.allocated is not None
    assert abs(expected.allocated / found.allocated - 1) < EXACT


def test_events_are_kept_beside_a_record_and_compared(tmp_path: Path) -> None:
    """A folder that is not there yet; the last stage of a pipeline, event by event as the trace has
    it."""
    folder = tmp_path / "new" / "folder"
    found = measure(case(use=("pp=2,micro_batches=4",), rank=1, history=True), folder, device="cpu")
    assert (found.result, found.error) == ("ok", "")
    assert (folder / found.events).is_file()
    beside = of_folder(folder, "formula", lambda *_: None)[0]
    assert beside.compared is not None
    assert beside.compared.same_bytes > 0.95 * beside.compared.bytes


def test_figures_are_kept_where_events_cannot_be(tmp_path: Path) -> None:
    found = child(case(seq=16, history=True), "cpu", tmp_path / "nowhere" / "e.gz")
    assert found["result"] == "ok"
    assert found["allocated"]
    assert "the events were not kept: FileNotFoundError" in found["error"]
    assert "events" not in found


class Counters:
    """What `torch.cuda` tells, scripted: each phase allocates more."""

    def __init__(self) -> None:
        self.reset = 0

    def synchronize(self, device: Any) -> None:
        """Nothing to wait for."""

    def max_memory_allocated(self, device: Any) -> int:
        return 100 * self.reset

    def max_memory_reserved(self, device: Any) -> int:
        return 1000 - self.reset

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {"requested_bytes.all.peak": 90 * self.reset, "num_alloc_retries": 3}

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.reset += 1

    def get_device_properties(self, device: Any) -> Any:
        import types

        return types.SimpleNamespace(total_memory=5000)


def test_counters_are_read_before_they_start_again() -> None:
    import torch
    from memfit.measure.meter import CudaMeter

    used = iter([70, 90, 80])
    meter = CudaMeter(torch.device("cpu"), Counters(), lambda: next(used))
    for phase in ("load", "forward", "backward"):
        meter.mark(phase)
    meter.close()
    assert [(one.phase, one.allocated, one.reserved) for one in meter.peaks] == [
        ("load", 100, 999),
        ("forward", 200, 998),
        ("backward", 300, 997),
    ]
    assert meter.device_peak == 90
    assert meter.figures() == {
        "allocated": 300,
        "reserved": 999,
        "requested": 270,
        "retries": 3,
        "total": 5000,
    }


def test_the_counters_are_those_of_torch() -> None:
    """Every name that the meter asks for, with the parameters that it gives."""
    import inspect

    import torch

    for name in (one for one in vars(Counters) if not one.startswith("_")):
        assert "device" in inspect.signature(getattr(torch.cuda, name)).parameters, name
    assert callable(torch.cuda._get_nvml_device_index)
    history = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"max_entries", "context"} <= set(history) or "kwargs" in history


def test_a_campaign_runs_the_best_first_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CAMPAIGN.replace("seq", 'precision = "fp32", seq'))
    todo = read(tmp_path / "c.toml", lambda name: CONFIG)
    assert [one.model for one in todo] == ["high", "low"]
    told: list[tuple[str, bool]] = []

    def hear(one: Case, record: Record | None) -> None:
        told.append((one.model, record is not None))

    assert (
        run(todo, tmp_path / "out", budget=5.0, limit=60.0, told=hear) == []
    )  # too little for any case
    run(todo[:1], tmp_path / "out", budget=300.0, limit=120.0, told=hear)
    run(todo, tmp_path / "out", budget=300.0, limit=120.0, told=hear)
    assert told == [("high", False), ("high", True), ("low", False), ("low", True)]
    assert {one.model: one.result for one in records(tmp_path / "out").values()} == {
        "high": "ok",
        "low": "ok",
    }
    assert json.loads((tmp_path / "out" / todo[0].file).read_text())["schema"] == 2


def test_what_was_cut_off_or_refused_is_left_for_another_call(tmp_path: Path) -> None:
    """A campaign goes on behind a case that lacks a package; only what took its own limit is a
    timeout for good."""
    todo = [case(seq=length) for length in (16, 32, 64)]
    ends = {16: "refused", 32: "timeout", 64: "timeout"}

    def one(asked: Case, folder: Path, *, device: str, limit: float) -> Record:
        if ends[asked.job.seq] == "refused":
            raise InputError.one("Liger's kernels are liger-kernel's, which is not installed")
        record = recorded(asked, {"result": "timeout", "by": "profiler"}, limit)
        folder.mkdir(exist_ok=True)
        write(record, folder / asked.file)
        return record

    told: list[str] = []
    made = run(
        todo[:2],
        tmp_path,
        budget=50.0,
        limit=100.0,
        told=lambda _, record: told.append(record.result if record else ""),
        one=one,
    )
    assert told == ["", "error", "", "timeout"]
    assert "not installed" in made[0].error
    assert not list(tmp_path.glob("*.json"))
    run(todo[2:], tmp_path, budget=500.0, limit=100.0, told=lambda *_: None, one=one)
    assert [path.name for path in tmp_path.glob("*.json")] == [todo[2].file]


def test_what_cannot_be_measured_is_refused_all_at_once() -> None:
    with pytest.raises(InputError) as refused:
        measure(
            case(liger=True, precision="bf16-master", optimizer="lion", attention="flash-attn-2"),
            device="cpu",
        )
    assert {problem.where for problem in refused.value.problems} == {
        "job.liger",
        "job.precision",
        "job.optimizer",
        "job.attention",
    }
    assert any("Triton" in problem.message for problem in refused.value.problems)


def test_a_run_that_takes_too_long_is_a_result() -> None:
    found = measure(case(), device="cpu", limit=0.1)
    assert (found.result, found.allocated) == ("timeout", None)
