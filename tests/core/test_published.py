"""Published rows: understood by meaning, refused with a reason, never dropped, whatever the file
holds."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.truth import Case, Refused, read
from memfit.truth.case import METRICS
from memfit.truth.published import known_targets, readers, understand
from memfit.truth.rows import Row, read_rows, row

GIB = 2**30
PLAIN: dict[str, Any] = {
    "id": "made-1",
    "source": "someone/somewhere:table.md",
    "model": "mistralai/Mistral-7B-v0.1",
    "task": "train",
    "engine": "TRL SFTTrainer",
    "engine_version": "transformers 4.48.1, torch 2.4.1+cu121; flash_attn 2.7.3",
    "gpu": "NVIDIA A100-SXM4-80GB",
    "gpus": 1,
    "batch": 4,
    "seq": 4096,
    "dtype": "bf16",
    "method": "lora r=16.0 q,k,v,o",
    "optimizer": "AdamW",
    "grad_checkpointing": True,
    "attention": "flash_attn2",
    "parallel": "none",
    "extra": {"lora_dropout": "0.1"},
    "metric": "peak_allocated",
    "unit": "GiB",
    "value": 23.5,
    "confidence": "high",
    "notes": "",
    "value_gib": 23.5,
    "scope": "one GPU",
}


def made(**changes: Any) -> Case | Refused:
    found = row(json.dumps({**PLAIN, **changes}).encode(), 1)
    return understand(found) if isinstance(found, Row) else found


def case(**changes: Any) -> Case:
    found = made(**changes)
    assert isinstance(found, Case), found
    return found


def reason(**changes: Any) -> str:
    found = made(**changes)
    assert isinstance(found, Refused), found
    return found.reason


def test_a_row_of_an_unknown_publisher_is_read_by_its_words() -> None:
    found = case()
    job = found.job
    assert (found.model, found.metric, found.value, found.source) == (
        "mistralai/Mistral-7B-v0.1",
        "peak_allocated",
        int(23.5 * GIB),
        "someone/somewhere",
    )
    assert (job.task, job.method, job.framework, job.batch, job.seq, job.rank, job.dropout) == (
        "finetune",
        "lora",
        "trl",
        4,
        4096,
        16,
        0.1,
    )
    assert (job.targets, job.checkpointing, job.attention, job.precision, job.optimizer) == (
        "q_proj,k_proj,v_proj,o_proj",
        "full",
        "flash-attn-2",
        "bf16",
        "adamw",
    )
    assert (job.version("transformers"), job.version("torch"), job.version("flash-attn")) == (
        (4, 48),
        (2, 4),
        (2, 7),
    )
    assert found.gpu is not None
    assert found.gpu.id == "a100-sxm-80gb"


@pytest.mark.parametrize(
    ("dtype", "precision", "quant", "double"),
    [
        ("weights bfloat16; autocast bf16; base NF4", "bf16-autocast", "nf4", False),
        ("weights float16; no autocast", "fp16", "none", None),
        ("bf16-mixed (fp32 weights, autocast)", "autocast-bf16", "none", None),
        ("bf16-true; weights bnb.nf4-dq", "bf16", "nf4", True),
        ("bnb fp4 / fp16", "fp16", "fp4", False),
        ("bf16 + 4-bit base (bnb nf4)", "bf16", "nf4", False),
        ("bnb int8", "bf16", "int8", None),
        ("32-true", "fp32", "none", None),
        ("bf16 (weights, grads, states)", "bf16", "none", None),
    ],
)
def test_numbers_in_their_many_spellings(
    dtype: str, precision: str, quant: str, double: bool | None
) -> None:
    job = case(dtype=dtype).job
    assert (job.precision, job.quant) == (precision, quant)
    assert double is None or job.double_quant is double


@pytest.mark.parametrize(
    ("model", "dtype", "name", "stored"),
    [
        (
            "TheBloke/Mistral-7B-v0.1-GPTQ",
            "GPTQ int4 g128",
            "mistralai/Mistral-7B-v0.1",
            {"quant_method": "gptq", "bits": 4, "group_size": 128},
        ),
        (
            "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4",
            "GPTQ-Int4",
            "Qwen/Qwen2.5-7B-Instruct",
            {"quant_method": "gptq", "bits": 4, "group_size": 128},
        ),
        (
            "TheBloke/Llama-2-70B-GPTQ",
            "base GPTQ int4, float16",
            "meta-llama/Llama-2-70b-hf",
            {"quant_method": "gptq", "bits": 4, "group_size": -1},
        ),
        (
            "Qwen/Qwen3-4B (FP8 variant repo)",
            "FP8",
            "Qwen/Qwen3-4B",
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
        ),
        ("NousResearch/Llama-2-70b-hf", "bf16", "meta-llama/Llama-2-70b-hf", None),
    ],
)
def test_mirrors_and_quantized_checkpoints_are_their_base(
    model: str, dtype: str, name: str, stored: dict[str, Any] | None
) -> None:
    found = case(model=model, dtype=dtype, method="lora r=8 q,v")
    assert found.model == name
    assert (json.loads(found.stored) if found.stored else None) == stored


def test_adapters_over_a_quantized_checkpoint_are_lora() -> None:
    """Whatever the row calls them: nothing is quantized while loading."""
    packed = {"model": "TheBloke/Mistral-7B-v0.1-GPTQ", "dtype": "GPTQ int4 g128"}
    assert case(**packed, method="qlora r=8 q,v").job.method == "lora"
    assert case(dtype="bf16, nf4", method="qlora r=8 q,v").job.method == "qlora"
    assert case(method="lora r=8 q,v").job.method == "lora"


def test_a_row_may_name_the_kernels_of_gptq() -> None:
    def kernels(name: str, dtype: str = "GPTQ int4 g128") -> dict[str, Any]:
        found = case(model="TheBloke/Mistral-7B-v0.1-GPTQ", dtype=dtype, extra={"kernel": name})
        return dict(json.loads(found.stored)) if found.stored else {}

    assert kernels("exllamav2")["exllama_config"] == {"version": 2}
    assert kernels("exllama")["exllama_config"] == {"version": 1}
    assert kernels("autogptq-cuda-old")["use_exllama"] is False
    assert kernels("triton").keys() == {"quant_method", "bits", "group_size"}
    assert kernels("exllamav2", "bf16") == {}


def test_inference_rows_have_a_prompt_and_new_tokens() -> None:
    found = case(
        task="inference",
        method="none",
        seq={"input": "~20 tokens", "new_tokens": 60},
        dtype="bf16",
        optimizer=None,
        grad_checkpointing=None,
    )
    assert (found.job.task, found.job.seq, found.job.new_tokens) == ("inference", 20, 60)


@pytest.mark.parametrize(
    ("unit", "value", "size"),
    [
        ("bytes", 1234567, 1234567),
        ("MiB", 2048, 2 * GIB),
        ("GB", 8.5, 8_500_000_000),
        ("MB", 1.5, 1_500_000),
        ("GiB", 1, GIB),
        *((f"{prefix}B", 3, 3 * 1000**power) for power, prefix in enumerate("KMG", 1)),
        *((f"{prefix}iB", 9, 9 * 1024**power) for power, prefix in enumerate("KMG", 1)),
        ("TB", 0.5, 500 * 1000**3),
        ("TiB", 0.5, 512 * GIB),
    ],
)
def test_units_mean_what_they_say(unit: str, value: float, size: int) -> None:
    assert case(unit=unit, value=value, value_gib=None).value == size


def test_a_static_cache_has_the_size_that_a_row_states() -> None:
    given: dict[str, Any] = {"task": "inference", "method": "none", "engine": "transformers"}
    given["seq"] = {"input": 16, "new_tokens": 8}

    def cache(**changes: Any) -> tuple[str, str, int]:
        job = case(**{**given, **changes}).job
        return job.framework, job.cache, job.cache_tokens

    assert cache() == ("transformers", "dynamic", 0)
    assert cache(extra={"cache_implementation": "static"}) == ("transformers", "static", 0)
    stated = {"cache": "StaticCache", "max_cache_len": 4096}
    assert cache(extra=stated) == ("transformers", "static", 4096)
    assert cache(engine="gpt-fast generate.py", extra={"max_seq_length": 2048}) == (
        "litgpt",
        "static",
        2048,
    )
    assert cache(extra={"max_seq_length": 2048}) == ("transformers", "dynamic", 0)
    torchao: dict[str, Any] = {
        "source": "pytorch/ao:torchao/_models/llama/benchmark_results.txt",
        "engine": "torchao gpt-fast style generate.py",
        "extra": {"compile": "False", "max_new_tokens": 200, "cache_size": 8192},
    }
    assert cache(**torchao) == ("litgpt", "static", 8192)
    linear = {**torchao["extra"], "linear_causal_mask": "True"}
    assert "linear_causal_mask" in str(made(**{**given, **torchao, "extra": linear}))


def test_a_unit_that_is_not_settled_falls_back_to_what_was_settled() -> None:
    assert case(unit="unknown", value=20.8, value_gib=20.0).value == 20 * GIB
    assert (
        reason(unit="unknown", value=20.8, value_gib=None) == "the unit or the value is not settled"
    )


def test_a_name_that_several_cards_have_is_the_smallest_and_said_so() -> None:
    found = case(gpu="NVIDIA A100 80GB (per README)")
    assert found.gpu is not None
    assert "80" in found.gpu.name
    assert any("taken for" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"metric": "throughput_only", "value": None}, "speed only: waits for the time model"),
        ({"metric": "beauty"}, "unknown metric"),
        ({"metric": None}, "unknown metric"),
        ({"gpus": 4}, "a strategy for several GPUs: not yet"),
        ({"gpus": 0}, "no GPU"),
        ({"gpus": None}, "the number of GPUs is not stated"),
        ({"parallel": "pp2"}, "a strategy for several GPUs: not yet"),
        ({"engine": "vLLM 0.11"}, "serving engines: not yet"),
        ({"engine": "a tool of one's own"}, "whose modelling code ran is not known"),
        ({"model": 'single kernel rms_norm {"T": 2048}'}, "a kernel's provider without formula"),
        ({"model": "nobody/Nothing-7B"}, "no config of the model"),
        ({"model": None}, "the model is not named"),
        ({"batch": "not stated"}, "the batch is not stated"),
        ({"batch": True}, "the batch is not stated"),
        ({"seq": "alpaca, unpacked"}, "the length of the longest sequence is not stated"),
        ({"method": "galore rank=128"}, "the method has no formula"),
        ({"method": "lora"}, "the rank of the adapters is not stated"),
        (
            {"method": "lora r=8 targets=model.layers.[\\d]+.(q|k)_proj"},
            "the targets of the adapters are a pattern",
        ),
        ({"optimizer": "Sophia"}, "the optimizer is not stated, or has no formula"),
        (
            {"grad_checkpointing": "offload"},
            "the gradient checkpointing is not stated, or has no formula",
        ),
        ({"attention": "flex_attention"}, "the attention kernel is not stated, or has no formula"),
        ({"dtype": "hqq 2-bit"}, "the weights are quantized in a way without formula"),
        ({"dtype": None}, "the dtype is not stated"),
        ({"metric": "nvidia-smi", "gpu": "a big one"}, "the GPU is not named"),
        ({"value": "about 20"}, "case"),
        ({"value": -3, "value_gib": None}, "the unit or the value is not settled"),
        ({"value": 1e300, "value_gib": None}, "the unit or the value is not settled"),
        ({"extra": {"lora_dropout": "much"}}, "the dropout of the adapters is not a number"),
        ({"extra": {"lora_dropout": 7}}, "the options contradict each other"),
    ],
)
def test_what_cannot_be_expressed_is_named(changes: dict[str, Any], why: str) -> None:
    found = made(**changes)
    assert (found.reason if isinstance(found, Refused) else "case") == why


def test_a_method_that_is_switched_off_is_no_other_method() -> None:
    assert case(method="lora r=16.0 q,k,v,o use_dora=False").job.method == "lora"
    assert reason(method="lora r=16.0 q,k,v,o use_dora=True") == "the method has no formula"


def test_a_publisher_of_single_gpus_is_not_read_for_several() -> None:
    one = {"source": "QwenLM/Qwen3:README.md", "task": "inference", "method": "none"}
    several = made(**one, gpus=4)
    assert isinstance(several, Refused)
    assert several.reason == "several GPUs: not yet"
    alone = made(**one)
    assert not isinstance(alone, Refused) or "several" not in alone.reason


def test_a_refused_row_keeps_what_it_is_about() -> None:
    found = made(optimizer="Sophia", task="train", confidence="low")
    assert isinstance(found, Refused)
    assert (found.id, found.source, found.metric) == (
        "made-1",
        "someone/somewhere",
        "peak_allocated",
    )
    assert (found.task, found.confidence) == ("train", "low")
    found = made(optimizer="Sophia", task=None, confidence=None)
    assert isinstance(found, Refused)
    assert (found.task, found.confidence) == ("", "")


@pytest.mark.parametrize(
    "strange",
    [
        None,
        [],
        {},
        "",
        "x" * 3000,
        -1,
        1.5,
        True,
        {"a": {"b": []}},
        [[["deep"]]],
        10**40,
        "\x00\ud800",
    ],
)
@pytest.mark.parametrize("field", sorted(set(PLAIN) - {"id"}))
def test_any_field_may_hold_anything(field: str, strange: Any) -> None:
    found = made(**{field: strange})
    assert isinstance(found, (Case, Refused))
    assert isinstance(found, Case) or found.reason


def test_readers_of_known_publishers_stand_the_same() -> None:
    for origin in readers():
        for field in ("seq", "extra", "engine_version", "dtype", "method", "notes", "optimizer"):
            for strange in (None, [], 7, {"x": None}, "…"):
                assert isinstance(made(source=f"{origin}:x", **{field: strange}), (Case, Refused))


@pytest.mark.parametrize(
    ("metric", "gib", "contradicts"),
    [
        ("peak_allocated", 50.0, True),
        ("peak_allocated", 60.0, False),
        ("allocated_end_of_step", 40.5, False),
    ],
)
def test_a_peak_below_what_the_stated_job_keeps_is_no_measurement_of_it(
    metric: str, gib: float, contradicts: bool
) -> None:
    """Full AdamW of a 7.24 B model in bf16 holds 8 bytes a parameter at its step, 53.95 GiB; after
    it the gradients are gone."""
    found = made(method="full", metric=metric, value=gib, value_gib=gib)
    assert isinstance(found, Refused) == contradicts
    assert (
        not isinstance(found, Refused)
        or found.reason == "the figure is smaller than what the stated job keeps"
    )


def test_lines_that_are_no_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"id": "a"\n\n[1]\nnull\n"text"\n{}\n{"id": 5, "metric": NaN}\n\xff\xfe\n'
        + b"[" * 5000
        + b"\n"
        + json.dumps(PLAIN).encode()
    )
    found = list(read(path))
    assert [type(one).__name__ for one in found] == ["Refused"] * 8 + ["Case"]
    assert [one.id for one in found] == [
        "line 1",
        "line 3",
        "line 4",
        "line 5",
        "line 6",
        "5",
        "line 8",
        "line 9",
        "made-1",
    ]
    assert [one.reason for one in found[:5] if isinstance(one, Refused)] == [
        "no JSON",
        "no JSON object",
        "no JSON object",
        "no JSON object",
        "unknown metric",
    ]


@pytest.mark.parametrize("content", [None, b"\x1f\x8b\x08broken", b"x" * (2**20 + 2)])
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / ("rows.jsonl.gz" if content and content.startswith(b"\x1f") else "rows.jsonl")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError):
        list(read(path))


def test_the_bundled_collection_is_whole() -> None:
    rows = list(read_rows())
    assert len(rows) == 2750
    assert all(isinstance(one, Row) and one.metric and one.model for one in rows)
    assert len({one.id for one in rows}) == 2750


def test_gzip_and_plain_are_read_alike(tmp_path: Path) -> None:
    line = json.dumps(PLAIN).encode()
    (tmp_path / "a.jsonl").write_bytes(line)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line))
    assert list(read(tmp_path / "a.jsonl")) == list(read(tmp_path / "a.jsonl.gz"))


def test_every_metric_of_a_case_has_a_word() -> None:
    assert all(one.metric in METRICS for one in read() if isinstance(one, Case))


def test_what_is_not_a_number_is_no_value() -> None:
    for value in (math.nan, math.inf, -math.inf):
        found = row(json.dumps({**PLAIN, "value": value, "value_gib": None}).encode(), 1)
        assert isinstance(found, Row)
        assert found.bytes is None


def test_targets_that_a_model_has_not_are_left_out() -> None:
    options = {"method": "lora", "targets": "q_proj,c_attn,down_proj"}
    known = known_targets(options, "meta-llama/Llama-2-7b-hf")
    assert known == {"method": "lora", "targets": "q_proj,down_proj"}
    assert options["targets"] == "q_proj,c_attn,down_proj"
    for same in (
        {"method": "lora", "targets": "all-linear"},
        {"method": "lora", "targets": "c_attn"},  # the job says what is wrong
        {"method": "full", "targets": "q_proj,c_attn"},
    ):
        assert known_targets(same, "meta-llama/Llama-2-7b-hf") == same


def test_gpus_that_nobody_says_how_they_share_are_refused_with_their_number() -> None:
    for parallel, detail in (
        ("", "4 GPUs, and not how they share the work"),
        ("none", "none"),
    ):
        found = made(gpus=4, parallel=parallel)
        assert isinstance(found, Refused)
        assert (found.reason, found.detail) == (
            "a strategy for several GPUs: not yet",
            detail,
        )
