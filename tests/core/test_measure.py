"""Cases, campaigns and records, all that needs no torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from memfit.api.verbs import planned
from memfit.errors import InputError
from memfit.job import Job
from memfit.measure.campaign import cases, read
from memfit.measure.child import failure
from memfit.measure.record import Case, Peak, Record, record_of, records, write
from memfit.measure.run import per_token, recorded, step_seconds
from memfit.units import parse_seconds

BENCH = Path(__file__).resolve().parents[2] / "bench" / "campaign.toml"
CONFIG = {"model_type": "llama", "num_hidden_layers": 8, "layer_types": ["full_attention"] * 8}


SPAN: dict[str, set[Any]] = {
    "method": {"full", "lora", "qlora", "freeze"},
    "task": {"finetune", "inference"},
    "checkpointing": {"none", "full"},
    "attention": {"sdpa", "flash", "math", "efficient", "cudnn", "eager"},
    "cache": {"dynamic", "static"},
    "precision": {"bf16", "fp16", "fp32", "autocast-bf16", "autocast-fp16", "bf16-autocast"},
    "optimizer": {
        "adamw",
        "adamw_fused",
        "adamw_loop",
        "sgd",
        "adafactor",
        "adamw_8bit",
        "paged_adamw_8bit",
        "lion_8bit",
    },
    "loss": {"plain", "liger", "liger-ce"},
    "framework": {"transformers", "trl"},
    "quantization": {"none", "nf4", "fp4", "int8"},
    "liger": {False, True},
    "merge": {False, True},
    "beams": {1, 4},
}


def test_the_campaign_has_its_cases_and_spans_what_it_must() -> None:
    """As the issue asks: at least 180 cases, 8 families, 0.1B to 32B, and every switch."""
    from memfit.model.families import build

    found = planned(str(BENCH))
    assert len(found) >= 180
    assert len({case.file for case in found}) == len(found)
    assert len({case.config["model_type"] for case in found}) >= 8
    sizes = {case.model: build(case.config, name=case.model).parameters for case in found}
    assert min(sizes.values()) < 0.2e9
    assert max(sizes.values()) > 32e9
    for name, wanted in SPAN.items():
        assert wanted <= {getattr(case.job, name) for case in found}, name
    assert {case.strategy.ranks for case in found} >= {1, 2, 4, 8, 64}
    assert {name for case in found for name, _ in case.strategy.uses()} >= {
        "fsdp",
        "tp",
        "ddp",
        "pp",
        "cp",
    }
    assert any(
        case.strategy.pp is not None and case.rank == case.strategy.ranks - 1 for case in found
    )
    assert found[0].history


def test_the_campaign_goes_up_to_what_an_80_gb_gpu_holds() -> None:
    """Batches and lengths in a grid, with and without checkpointing, whose ends are said not to
    fit; prompts of tens of thousands of tokens."""
    import memfit

    found = [case for case in planned(str(BENCH)) if not case.use]
    grid = [case for case in found if case.model == "meta-llama/Llama-3.2-1B" and case.job.training]
    assert {case.job.batch for case in grid} >= {1, 2, 4, 8, 16, 32}
    assert {case.job.seq for case in grid} >= {512, 1024, 2048, 4096, 8192, 16384, 32768}
    assert any(case.job.seq >= 32000 for case in found if not case.job.training)
    said = {
        memfit.estimate(case.config, gpu="h100-sxm", **case.changes).verdict
        for case in grid
        if case.job.batch * case.job.seq > 32000
    }
    assert said >= {"fits", "no"}


def test_every_case_of_the_campaign_can_be_predicted() -> None:
    """One of each kind: what is measured on one GPU has formulas to be held against."""
    from memfit.lower import lower
    from memfit.model.families import build

    kinds = {
        (case.model, case.job.task, case.job.method): case
        for case in planned(str(BENCH))
        if not case.use
    }
    for case in list(kinds.values())[::5]:
        assert lower(build(case.config, name=case.model), case.job, compact=True).events


def test_lists_multiply_and_alternatives_do_not() -> None:
    table = {
        "models": ["a", "b"],
        "value": 3,
        "job": {"seq": [1, 2]},
        "jobs": [{"batch": [1, 2]}, {"method": "lora"}],
        "layers": 2,
    }
    found = [one.case for one in cases(table, lambda name: CONFIG, "here")]
    assert len(found) == 2 * (2 * 2 + 2)
    assert {len(one.config["layer_types"]) for one in found} == {2}
    assert found[0].name == "a:2/seq=1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no cases"),
        ("[[cases]", "` is not valid TOML:"),
        ("[[cases]]\nvalue = 1", "table needs a list `models`"),
        ('[[cases]]\nmodels = ["m"]\nvalu = 1', "unknown key `valu`"),
        ('[[cases]]\nmodels = ["m"]\njob = { bach = 1 }', "unknown option `bach`"),
        ('[[cases]]\nmodels = ["m"]\njob = { seq = -1 }', "`-1` is out of range"),
    ],
)
def test_a_broken_campaign_is_told(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(InputError, match=said):
        read(tmp_path / "c.toml", lambda name: CONFIG)
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "none.toml", lambda name: CONFIG)


def case(**job: Any) -> Case:
    return Case(model="m", config=CONFIG, job=Job(**job))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    phases = (
        Peak(phase="forward", step=0, allocated=5, reserved=8, seconds=1.0),
        Peak(phase="step", step=1, allocated=7, reserved=8, seconds=2.0),
    )
    answer = {
        "result": "ok",
        "by": "cuda",
        "gpu": "NVIDIA T4",
        "allocated": 7,
        "reserved": 8,
        "phases": [vars(one) for one in phases],
    }
    made = recorded(case(batch=2, seq=100), answer, 3.5)
    assert made.step_seconds == (1.0, 2.0)
    assert made.tokens_per_second == 2 * 100 / 2.0  # the first step is not counted
    write(made, tmp_path / case().file)
    assert list(records(tmp_path).values()) == [made]
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("change", [{"schema": 1}, {"what": 1}, {"phases": [{"phase": "x"}]}])
def test_what_is_no_record_is_refused(change: dict[str, Any]) -> None:
    good = json.loads(
        json.dumps(dataclasses.asdict(recorded(case(), {"result": "ok", "by": "cuda"}, 1.0)))
    )
    assert isinstance(record_of(good, "here"), Record)
    with pytest.raises(InputError):
        record_of({**good, **change}, "here")


def test_running_out_of_memory_says_how_much_was_asked_for() -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    text = (
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of "
        "79.10 GiB of which 512.00 MiB is free. "
        "Including non-PyTorch memory, this process has 78.5 GiB memory in use."
    )
    found = failure(OutOfMemoryError(text))
    assert (found["result"], found["asked"], found["free"]) == (
        "oom",
        int(2.5 * 2**30),
        512 * 2**20,
    )
    assert failure(ValueError("no"))["result"] == "error"
    older = (
        "Tried to allocate 2.50 GiB (GPU 0; 79.10 GiB total capacity; 70.00 GiB already "
        "allocated; 512.00 MiB free; 71.00 GiB reserved)"
    )
    found = failure(OutOfMemoryError(f"CUDA out of memory. {older}"))
    assert (found["asked"], found["free"]) == (int(2.5 * 2**30), 512 * 2**20)


def test_operations_of_a_token_by_hand() -> None:
    """gpt2: 124,439,808 weights, of which 786,432 are looked up by position and the embedding is
    the head's; 12 layers of 12 heads of 64."""
    from memfit.model.source import from_catalog

    config = from_catalog("openai-community/gpt2").config
    one = Case(model="gpt2", config=config, job=Job(seq=100))
    forward = 2 * (124_439_808 - 786_432) + 12 * 4 * 768 * 100
    assert per_token(one) == 3 * forward
    assert per_token(dataclasses.replace(one, job=Job(seq=100, method="lora"))) == 2 * forward
    assert (
        per_token(dataclasses.replace(one, job=Job(task="inference", seq=90, new_tokens=10)))
        == forward
    )
    assert per_token(dataclasses.replace(one, use=("tp=2",))) == 3 * forward // 2


def test_processes_are_counted_from_nought(capsys: pytest.CaptureFixture[str]) -> None:
    from memfit.cli import main

    for words, said in (
        (
            ["measure", "openai-community/gpt2", "--world", "4", "--process", "4"],
            "process 4 does not exist: the layout has 4 processes",
        ),
        (
            ["measure", "openai-community/gpt2", "--world", "4", "--use", "tp=2"],
            "`--world` and `--use` both set the layout",
        ),
        (["measure", "openai-community/gpt2", "--use", "tpp=2"], "unknown layout `tpp`"),
        (["measure", "openai-community/gpt2", "--framework", "vllm"], "vllm"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_tokens_a_second_are_those_of_the_rank() -> None:
    """Of a pipeline all micro-batches pass; of a sequence that is split a part; a prompt alone is
    read."""
    peaks = [
        Peak(phase="forward", step=step, allocated=1, reserved=1, seconds=2.0) for step in (0, 1)
    ]
    answer = {"result": "ok", "by": "cuda", "phases": [vars(one) for one in peaks]}
    whole = recorded(case(seq=512), answer, 1.0).tokens_per_second
    assert whole == 256
    for use, share in (("pp=2,micro_batches=4", 4.0), ("cp=2 fsdp=2", 0.5), ("fsdp=4", 1.0)):
        found = recorded(dataclasses.replace(case(seq=512), use=tuple(use.split())), answer, 1.0)
        assert found.tokens_per_second == whole * share, use
    read_only = {**answer, "phases": [{**vars(peaks[0]), "phase": "prefill"}]}
    assert (
        recorded(case(task="inference", seq=100, new_tokens=0), read_only, 1.0).tokens_per_second
        == 50
    )


def test_a_cpu_that_is_full_is_out_of_memory_too() -> None:
    text = (
        "[enforce fail at alloc_cpu.cpp:124] data. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 13107200000 bytes. Error code 12"
    )
    found = failure(RuntimeError(text))
    assert (found["result"], found["asked"]) == ("oom", 13107200000)
    assert found["free"] is None or found["free"] >= 0


@pytest.mark.parametrize(
    ("engine", "job", "said"),
    [
        ("vlm", {}, "unknown engine `vlm`"),
        ("vllm,gpu_memory_utilisation=1", {}, "did you mean `gpu_memory_utilization`"),
        ("vllm,gpu_memory_utilization=7", {}, "`7.0` must be between 0 and 1"),
        ("vllm,enforce_eager=perhaps", {}, "`perhaps` is not a valid value"),
        ("vllm", {"task": "finetune"}, "`engine` applies to inference only"),
        ("vllm", {"beams": 4, "precision": "autocast-bf16"}, "does not support `autocast-bf16`"),
        ("vllm", {}, "can only be measured on a GPU"),
    ],
)
def test_an_engine_is_asked_for_in_words(engine: str, job: dict[str, Any], said: str) -> None:
    from memfit.measure.serving import refusals

    found = list(
        refusals(
            Case(model="m", config=CONFIG, job=Job(**{"task": "inference", **job}), engine=engine),
            "cpu",
        )
    )
    assert any(said in str(one) for one in found), found


def test_steps_are_summed_over_their_phases() -> None:
    peaks = tuple(
        Peak(phase=phase, step=step, allocated=1, reserved=None, seconds=0.5)
        for step in (0, 1)
        for phase in ("prepare", "forward", "backward")
    )
    assert step_seconds(peaks) == (1.0, 1.0)


def test_times_are_read() -> None:
    assert [parse_seconds(text) for text in ("25m", "540s", "1.5h", "90")] == [1500, 540, 5400, 90]
    with pytest.raises(InputError, match="`soon` is not a duration"):
        parse_seconds("soon", "budget")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["measure", "tiny", "--only", "x"], "`--only` applies to campaigns only"),
        (["measure", "tiny", "--list"], "`--list` applies to campaigns only"),
        (["measure", "tiny", "--campaign", str(BENCH)], "`: the campaign's file names the models"),
        (
            ["measure", "--campaign", str(BENCH), "--seq", "9"],
            "`seq` is set by the campaign's file",
        ),
        (["measure", "--campaign", str(BENCH), "--budget", "soon"], "`soon` is not a duration"),
        (["measure"], "no model is given"),
    ],
)
def test_words_that_make_no_sense_are_told(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from memfit.cli import main

    assert main(words) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.out == ""
