"""Everything that `memfit measure` runs, for real on this machine's CPU, beside what the trace says
of it: within some hundred bytes."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("accelerate")


import torch
from memfit.errors import InputError
from memfit.job import Job
from memfit.measure.child import run
from memfit.measure.compare import predicted
from memfit.measure.record import Case, Record, read
from memfit.measure.run import recorded

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
EXACT = 2048  # bytes: what Python and torch hold on their own account, here and there
RANKS = {
    "fsdp": {"use": "fsdp=4"},
    "fsdp-16-bits": {"use": "fsdp=8,param_dtype=bf16,reduce_dtype=fp32"},
    "fsdp-autocast": {"use": "fsdp=2", "precision": "autocast-bf16"},
    "fsdp-lora": {"use": "fsdp=4", "method": "lora"},
    "tp-lora": {"use": "tp=2", "method": "lora", "targets": "q_proj,k_proj,v_proj"},
    "hybrid": {"use": "ddp=2 fsdp=2"},
    "fsdp-tp": {"use": "fsdp=2 tp=2"},
    "sequence": {"use": "tp=2,sequence=yes"},
    "ddp": {"use": "ddp=2"},
    "tp-answers": {"use": "tp=2", "task": "inference", "new_tokens": 4},
    "first-stage": {"use": "pp=2"},
    "last-stage": {"use": "pp=2", "rank": 1},
    "zero-bubble": {"use": "pp=2,schedule=zero-bubble,virtual=2", "rank": 1},
}
JOBS = {
    "bf16": {"precision": "bf16"},
    "autocast": {"precision": "autocast-bf16"},
    "adafactor": {"optimizer": "adafactor"},
    "math": {"attention": "math"},
    "merged": {"method": "lora", "merge": True},
    "static": {"task": "inference", "cache": "static", "new_tokens": 5},
    "frozen": {"method": "freeze", "trainable": "layers.3."},
    "checkpointed": {"checkpointing": "full", "method": "lora"},
}
TRL = {
    "fused": {"framework": "trl"},
    "chunked": {
        "framework": "trl",
        "loss": "chunked",
        "method": "lora",
        "precision": "autocast-bf16",
    },
}
PACKED = {
    "qlora": {"method": "qlora"},
    "checkpointed": {"method": "qlora", "checkpointing": "full"},
    "int8": {"method": "lora", "quant": "int8"},
    "once": {"method": "qlora", "double_quant": False},
}
RECORDS = sorted((Path(__file__).resolve().parents[2] / "records" / "cpu").glob("*.json"))
pytestmark = pytest.mark.filterwarnings("ignore")


def measured(options: dict[str, Any]) -> Record:
    given = dict(options)
    use, rank = tuple(given.pop("use", "").split()), given.pop("rank", 0)
    case = Case(
        model="tiny",
        config=CONFIG,
        job=Job(**{"precision": "fp32", "seq": 64, "batch": 2, **given}),
        use=use,
        rank=rank,
    )
    gc.collect()  # what an earlier case left would be counted as gone in this one
    return recorded(case, run(case, "cpu", None), 1.0)


def agrees(options: dict[str, Any]) -> None:
    found = measured(options)
    assert found.result == "ok", found.error
    expected = predicted(found)
    assert expected is not None
    assert found.allocated is not None
    assert abs(expected.allocated - found.allocated) <= EXACT


@pytest.mark.parametrize("name", RANKS)
def test_a_rank_among_others(name: str) -> None:
    agrees(RANKS[name])


@pytest.mark.parametrize("name", JOBS)
def test_a_job(name: str) -> None:
    agrees(JOBS[name])


@pytest.mark.parametrize("name", TRL)
def test_heads_of_trl(name: str) -> None:
    pytest.importorskip("trl")
    agrees(TRL[name])


@pytest.mark.parametrize("name", PACKED)
def test_weights_that_bitsandbytes_packs(name: str) -> None:
    pytest.importorskip("bitsandbytes", minversion="0.48", exc_type=ImportError)
    agrees(PACKED[name])


@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw_8bit",
        "paged_adamw_8bit",
        "lion_8bit",
        "ademamix_8bit",
        "rmsprop_bnb_8bit",
        "lion_32bit",
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_in_eight_bits(optimizer: str, precision: str) -> None:
    pytest.importorskip("bitsandbytes", minversion="0.50", exc_type=ImportError)
    agrees({"optimizer": optimizer, "precision": precision})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": "liger"}, "Triton"),
        ({"use": "cp=2 fsdp=2"}, "torch does not support context parallelism on the CPU"),
        ({"use": "fsdp=2,version=1"}, "FSDP1 does not run on the CPU"),
        ({"attention": "efficient"}, "no attention kernel `efficient`"),
        ({"unsloth": "norms"}, "Unsloth"),
        ({"optimizer": "grokadamw"}, "cannot be measured yet"),
    ],
    ids=lambda one: next(iter(one.values())) if isinstance(one, dict) else "",
)
def test_what_a_cpu_cannot_is_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        measured(options)
    assert said in str(refused.value)


def test_every_case_of_the_campaign_can_be_run_on_a_gpu() -> None:
    """Nothing of it is refused there, but for packages that are not installed here: a GPU's day is
    short."""
    from memfit.api.verbs import planned
    from memfit.measure.real import refusals

    bench = Path(__file__).resolve().parents[2] / "bench" / "campaign.toml"
    for case in planned(str(bench)):
        said = [
            one.message
            for one in refusals(case, torch.device("cuda", 0))
            if "not installed" not in one.message
        ]
        assert not said, (case.name, said)


@pytest.mark.slow
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name[-13:-5])
def test_the_committed_records_are_foretold(path: Path) -> None:
    """Measured once on a CPU by torch's profiler, real widths, few layers: the trace is within a
    thousandth."""
    found = read(path)
    assert found.result == "ok"
    if "framework" in found.job:
        pytest.importorskip("trl")
    for library in ("torch", "transformers", "peft"):
        if (
            found.versions[library].split(".")[:2]
            != importlib.metadata.version(library).split(".")[:2]
        ):
            pytest.skip(f"measured with {library} {found.versions[library]}")
    expected = predicted(found)
    assert expected is not None
    assert found.allocated is not None
    assert abs(expected.allocated / found.allocated - 1) < 0.001


@pytest.mark.slow
def test_a_cpu_runs_out_of_memory_as_a_gpu_does(tmp_path: Path) -> None:
    """Under a limit of 8 GiB, logits of 13 GB: the record says what was asked for and what was
    free."""
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                **CONFIG,
                "vocab_size": 200_000,
                "max_position_embeddings": 4096,
                "num_hidden_layers": 1,
            }
        )
    )
    words = (
        f"{sys.executable} -m memfit measure {config} --precision fp32 --batch 4 --seq 4096 --json"
    )
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v {8 * 2**20}; exec {words}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["result"] == "oom", found["error"]
    assert found["asked"] >= 13e9
    assert found["free"] < 8 * 2**30


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed"
)
def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="not installed") as refused:
        measured({"method": "qlora", "optimizer": "adamw_8bit"})
    assert {one.where for one in refused.value.problems} == {"job.quant", "job.optimizer"}
