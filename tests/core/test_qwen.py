"""Qwen's first models, whose code came with their checkpoints and is not here: held by peaks that
this code had under the trace, by counts of its parameters, and by a run that its users published.
"""

from __future__ import annotations

from typing import Any

import pytest

from memfit import estimate
from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.model import catalog
from memfit.model.families import build
from memfit.simulate.memory import memory

SMALL = {
    "model_type": "qwen",
    "hidden_size": 256,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "kv_channels": 64,
    "vocab_size": 4001,
    "seq_length": 512,
    "max_position_embeddings": 1024,
    "bf16": True,
}
FULL = {"checkpointing": "full", "reentrant": True}
ONE = {"batch": 1, "attention": "flash-attn-2"}


@pytest.mark.parametrize(
    ("options", "peak"),
    # Qwen/Qwen-72B modeling_qwen.py of December 2023, its chat functions left out, under memfit's
    # trace: transformers 5.23, torch 2.13
    [
        ({"attention": "sdpa"}, 89_272_320),
        ({"attention": "sdpa", "packing": False}, 89_800_704),
        ({"attention": "sdpa", **FULL}, 70_225_920),
        ({"attention": "flash-attn-2"}, 88_745_984),
        ({"attention": "flash-attn-2", "packing": False}, 87_701_504),
        (
            {**ONE, **FULL, "precision": "bf16-autocast", "method": "lora", "targets": "c_attn"},
            41_943_040,
        ),
        ({**ONE, "method": "lora"}, 54_616_064),
        (
            {
                "batch": 1,
                "attention": "sdpa",
                "precision": "bf16-autocast",
                "method": "lora",
                "targets": "c_attn",
                "packing": False,
            },
            51_958_784,
        ),
        ({**ONE, **FULL, "precision": "bf16-autocast", "accumulate": 2}, 73_009_664),
    ],
    ids=str,
)
def test_peaks_are_those_of_its_own_code(options: dict[str, Any], peak: int) -> None:
    job = Job(**{"batch": 2, "seq": 256, **options})
    assert memory(lower(build(SMALL), job)).allocated == pytest.approx(peak, rel=5e-4)


def test_parameters() -> None:
    """Qwen-72B: half of `total_size` in its index; Qwen-7B: the trained parameters that ms-swift
    printed for full training, in millions."""
    assert build(catalog.entry("Qwen/Qwen-72B-Chat").config()).parameters == 144_575_840_256 // 2
    assert (
        round(build(catalog.entry("Qwen/Qwen-7B-Chat").config()).parameters / 1e6, 4) == 7721.3245
    )


@pytest.mark.parametrize(
    ("seq", "gib"), [(512, 73.37), (1024, 73.64), (2048, 74.26), (4096, 78.76)]
)
def test_full_training_as_ms_swift_measured_it(seq: int, gib: float) -> None:
    """docs/source_en/LLM/Benchmark.md at b40f31df7^: reserved on an A100, whatever lengths up to
    the cap came before."""
    found = estimate(
        "Qwen/Qwen-7B-Chat",
        batch=1,
        seq=seq,
        precision="bf16-autocast",
        attention="flash-attn-2",
        accumulate=16,
        clip=1.0,
        packing=False,
        gpu="a100-sxm-80gb",
        versions="transformers=4.36,torch=2.1",
        framework="transformers",
        **FULL,
    )
    assert found.memory.reserved / 2**30 == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"checkpointing": "full"}, "job.reentrant"),
        ({"checkpointing": "every", "reentrant": True}, "job.checkpointing"),
        ({"attention": "eager"}, "job.attention"),
        ({"task": "inference", "cache": "static"}, "job.cache"),
    ],
)
def test_what_its_code_does_not_do_is_refused(options: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as caught:
        lower(build(SMALL), Job(**options))
    assert [problem.where for problem in caught.value.problems] == [where]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"kv_channels": 32}, "kv_channels"),
        ({"intermediate_size": 1407}, "intermediate_size"),
        ({"fp16": True}, "bf16"),
        ({"rotary_pct": 0.5}, "rotary_pct"),
        ({"use_cache_quantization": True}, "use_cache_quantization"),
    ],
)
def test_configs_that_its_code_stops_at_are_refused(change: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        build({**SMALL, **change})
    assert {problem.where for problem in caught.value.problems} == {f"config.{key}"}


def test_packed_texts_of_ms_swift_are_as_long_as_allowed() -> None:
    """swift-0120 (two ranks of DDP) and swift-0122 say no more than a cap; others of that table
    stay refused."""
    from memfit.truth.case import Case
    from memfit.truth.published import read

    rows = {
        row.id: row
        for row in read()
        if row.id in ("swift-0116", "swift-0120", "swift-0121", "swift-0122")
    }
    answered = {name: row for name, row in rows.items() if isinstance(row, Case)}
    assert {name: (row.job.seq, row.strategy.size("ddp")) for name, row in answered.items()} == {
        "swift-0120": (2048, 2),
        "swift-0122": (2048, 1),
    }
