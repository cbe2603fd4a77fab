"""Rows that nobody here has seen: other publishers' words for the same things, and rows broken in
every way. A row is understood, or refused with a reason; no file brings memfit down."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from memfit.cli import main
from memfit.strategy import DDP, FSDP, TP, Strategy, ZeRO
from memfit.truth import Case, Refused, read
from memfit.truth.case import Case as TruthCase
from memfit.truth.published import understand
from memfit.truth.releases import newest, stored
from memfit.truth.rows import Row, read_rows, row
from memfit.truth.single import Kernel

GIB = 2**30
TRAINED: dict[str, Any] = {
    "id": "made-1",
    "source": "acme/bench:README.md",
    "model": "meta-llama/Llama-3.1-8B",
    "task": "train",
    "engine": "Hugging Face Trainer",
    "engine_version": "transformers 4.46.2; torch 2.5.1; peft 0.13.2",
    "gpu": "NVIDIA A100-SXM4-80GB",
    "gpus": 1,
    "batch": 2,
    "seq": 2048,
    "dtype": "bf16",
    "method": "lora r=16 q,k,v,o",
    "optimizer": "adamw_torch",
    "grad_checkpointing": True,
    "attention": "sdpa",
    "parallel": "none",
    "extra": {},
    "metric": "peak_allocated",
    "unit": "GiB",
    "value": 90.0,
    "confidence": "high",
    "notes": "",
    "scope": "one GPU",
}
SERVED = {
    "task": "inference",
    "method": "none",
    "optimizer": None,
    "grad_checkpointing": None,
    "seq": {"input": 512, "new_tokens": 64},
}


def made(**changes: Any) -> Case | Kernel | Refused:
    found = row(json.dumps({**TRAINED, **changes}).encode(), 1)
    return understand(found) if isinstance(found, Row) else found


def case(**changes: Any) -> TruthCase:
    found = made(**changes)
    assert isinstance(found, TruthCase), found
    return found


@pytest.mark.parametrize(
    ("field", "words", "option", "value"),
    [
        ("dtype", "torch.bfloat16", "precision", "bf16"),
        ("dtype", "half", "precision", "fp16"),
        ("dtype", "bf16 mixed precision", "precision", "autocast-bf16"),
        ("dtype", "fp16 (amp)", "precision", "autocast-fp16"),
        ("dtype", "tf32", "precision", "fp32"),
        ("dtype", "bitsandbytes 8-bit", "quant", "int8"),
        ("dtype", "load_in_4bit", "quant", "fp4"),
        ("dtype", "bf16, bnb-4bit", "quant", "nf4"),
        ("method", "LoRA rank 32 on q,v", "rank", 32),
        ("method", "LoRA rank 32 on q,v", "targets", "q_proj,v_proj"),
        ("method", "LoRA (r=8, alpha=16, targets=all-linear)", "targets", "all-linear"),
        ("method", "rsLoRA r=16 q+v", "method", "lora"),
        ("method", "full-parameter", "method", "full"),
        ("method", "FFT", "method", "full"),
        ("optimizer", "adamw_torch_fused", "optimizer", "adamw_fused"),
        ("optimizer", "adamw_bnb_8bit", "optimizer", "adamw_8bit"),
        ("optimizer", "bitsandbytes' 8-bit AdamW", "optimizer", "adamw_8bit"),
        ("optimizer", "torch's AdamW, not 8-bit", "optimizer", "adamw"),
        ("optimizer", "AdamW, paged, 8-bit", "optimizer", "paged_adamw_8bit"),
        ("optimizer", "AdamW with fused=True", "optimizer", "adamw_fused"),
        ("optimizer", "AdamW with fused=False", "optimizer", "adamw"),
        ("optimizer", "AdamW8bit (bitsandbytes)", "optimizer", "adamw_8bit"),
        ("optimizer", "paged_adamw_32bit", "optimizer", "paged_adamw"),
        ("optimizer", "Adafactor", "optimizer", "adafactor"),
        ("optimizer", "SGD, momentum 0.9", "optimizer", "sgd_momentum"),
        ("optimizer", "SGD momentum=0", "optimizer", "sgd"),
        ("optimizer", "Lion", "optimizer", "lion"),
        ("optimizer", "schedule-free AdamW", "optimizer", "schedule_free_adamw"),
        ("optimizer", "Lion 8-bit", "optimizer", "lion_8bit"),
        ("optimizer", "galore_adamw", "optimizer", "galore_adamw"),
        ("optimizer", "muon", "optimizer", "muon"),
        ("optimizer", "Adam-mini", "optimizer", None),
        ("optimizer", None, "optimizer", "adamw"),
        ("grad_checkpointing", "True", "checkpointing", "full"),
        ("grad_checkpointing", "no", "checkpointing", "none"),
        ("grad_checkpointing", "non-reentrant", "reentrant", False),
        ("grad_checkpointing", True, "reentrant", True),
        ("grad_checkpointing", None, "checkpointing", "none"),
        ("attention", "FA2", "attention", "flash-attn-2"),
        ("attention", "FlashAttention", "attention", "flash-attn-2"),
        ("attention", "fa3", "attention", "flash-attn-3"),
        ("attention", "sdpa (math)", "attention", "math"),
        ("attention", "sdpa, memory-efficient", "attention", "efficient"),
        ("attention", "with and without FA2", "attention", "sdpa"),
        ("attention", None, "attention", "sdpa"),
        ("seq", "2,048", "seq", 2048),
        ("seq", "2k", "seq", 2048),
        ("seq", "packed to 1024 tokens", "seq", None),
        ("seq", "1024 (packed)", "seq", 1024),
        ("seq", "max 2048", "seq", None),
        ("seq", "mean 812 tokens", "seq", None),
        ("seq", "512-2048", "seq", None),
        ("batch", "2 per device", "batch", 2),
        ("batch", "1-4", "batch", None),
        ("extra", {"gradient_accumulation_steps": 8}, "accumulate", 8),
        ("engine", "LLaMA-Factory 0.9", "precision", "bf16-autocast"),
        ("engine", "HF PEFT, own loop", "clip", 0.0),
        ("engine", "unsloth", "framework", None),
        ("engine", "axolotl + CutCrossEntropyPlugin", "framework", None),
        ("task", "dpo", "task", None),
    ],
)
def test_other_words_for_the_same_things(field: str, words: Any, option: str, value: Any) -> None:
    """None: refused, rather than taken for something that it is not."""
    found = made(**{field: words})
    assert (getattr(found.job, option) if isinstance(found, TruthCase) else None) == value


@pytest.mark.parametrize(
    ("seq", "prompt", "new"),
    [
        ({"input": "1024", "output": 256}, 1024, 256),
        ({"prompt_tokens": 77, "max_new_tokens": 5}, 77, 5),
        ({"input": 9, "new_tokens": 0}, 9, 0),
        ("1024 + 256 new tokens", 1024, 256),
        ("prompt 1024, 256 generated", 1024, 256),
        (100, 100, 0),
    ],
)
def test_prompts_and_answers_in_other_words(seq: Any, prompt: int, new: int) -> None:
    job = case(**{**SERVED, "seq": seq}).job
    assert (job.task, job.seq, job.new_tokens) == ("inference", prompt, new)


@pytest.mark.parametrize(
    ("parallel", "gpus", "strategy"),
    [
        ("ddp", 8, Strategy(ddp=DDP(size=8))),
        ("DDP x8", 8, Strategy(ddp=DDP(size=8))),
        ("fsdp8", 8, Strategy(fsdp=FSDP(size=8, version=1))),
        ("FSDP full shard", 4, Strategy(fsdp=FSDP(size=4, version=1))),
        ("fsdp2", 8, Strategy(fsdp=FSDP(size=8, version=2))),
        ("fsdp2", 2, Strategy(fsdp=FSDP(size=2, version=1))),
        ("FSDP SHARD_GRAD_OP", 2, Strategy(fsdp=FSDP(size=2, version=1, reshard=False))),
        ("DeepSpeed ZeRO-3", 8, Strategy(zero=ZeRO(size=8, stage=3))),
        (
            "zero stage 2, optimizer offload",
            4,
            Strategy(zero=ZeRO(size=4, stage=2, offload_optimizer="cpu")),
        ),
        (
            "zero3 + cpu offload",
            4,
            Strategy(zero=ZeRO(size=4, stage=3, offload_optimizer="cpu", offload_param="cpu")),
        ),
        ("tp2", 2, Strategy(tp=TP(size=2))),
        ("fsdp4 tp2", 8, Strategy(tp=TP(size=2), fsdp=FSDP(size=4, version=1))),
        ("tensor parallel 2", 8, Strategy(tp=TP(size=2), ddp=DDP(size=4))),
        ("none", 8, None),
        ("device_map auto", 2, None),
        ("pp4", 4, None),
        ("fsdp16", 8, None),
        ("ddp4", 8, None),
        ("tp3", 8, None),
    ],
)
def test_layouts_by_their_words(parallel: str, gpus: int, strategy: Strategy | None) -> None:
    found = made(parallel=parallel, gpus=gpus, scope="per GPU")
    assert (found.strategy if isinstance(found, TruthCase) else None) == strategy


def test_a_sum_over_gpus_is_no_rank_s_memory() -> None:
    found = made(parallel="ddp", gpus=2, scope="sum over GPUs")
    assert isinstance(found, Refused)
    assert found.reason == "a sum over GPUs, not one GPU's memory"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("LLaMA-2 7B", "meta-llama/Llama-2-7b-hf"),
        ("llama3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("MISTRAL-7B-V0.1", "mistralai/Mistral-7B-v0.1"),
        ("Llama-31-8B", None),
    ],
)
def test_models_in_other_spellings(name: str, model: str | None) -> None:
    found = made(model=name, method="lora r=16 targets=all-linear")
    assert (found.model if isinstance(found, TruthCase) else None) == model


def test_versions_that_are_not_stated_are_of_the_time_of_those_that_are() -> None:
    """A new TRL with an old transformers never ran together."""
    found = case(engine="TRL SFTTrainer", engine_version="transformers 4.46.2")
    assert found.job.version("trl") == (0, 11)
    assert found.job.version("torch") == (2, 5)
    assert "trl 0.11 is taken, the newest of 2024-10" in found.notes
    assert case(engine_version="2024-06").job.version("transformers") == (4, 42)
    assert (
        case(engine_version="2030-01").job.versions == case(engine_version=None).job.versions == ""
    )
    assert any("no version is stated" in note for note in case(engine_version=None).notes)


def test_releases_stand_in_order() -> None:
    for listed in (value for value in stored().values() if isinstance(value, dict)):
        months = list(listed.values())
        numbers = [tuple(map(int, version.split("."))) for version in listed]
        assert months == sorted(months)
        assert numbers == sorted(numbers)
    assert newest("transformers", "2020-01") is None


# ------------------------------------------------------------------------------------- broken rows
STRANGE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    3.5,
    1e30,
    10**25,
    float("nan"),
    float("inf"),
    "",
    "none",
    "-3",
    "1e5",
    [],
    {},
    {"input": 0},
    "é\u0000",
    "lora r=0 q",
    "fsdp0",
    "lora r=999999 all",
    "zero3 x0",
    "tp0",
    "ddp 0",
    "GPTQ g0",
    "bf16",
    "nf4",
    10**12,
)
SIGNS = "0123456789,.=[](){} xq\\"


def broken(
    given: dict[str, Any], others: list[dict[str, Any]], rng: random.Random
) -> dict[str, Any]:
    """A row with up to three fields gone, exchanged, cut, multiplied or strange."""
    found = dict(given)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(sorted(found) or ["id"])
        value, how = found.get(name), rng.random()
        if how < 0.15:
            found.pop(name, None)
        elif how < 0.6:
            found[name] = rng.choice(STRANGE)
        elif how < 0.75:
            found[name] = rng.choice(others).get(name)
        elif isinstance(value, str) and value:
            at = rng.randrange(len(value))
            found[name] = value[:at] + rng.choice(SIGNS) + value[at + rng.randint(0, 3) :]
        elif isinstance(value, (int, float)):
            found[name] = value * rng.choice([0, -1, 2, 1000, 0.5])
        elif isinstance(value, dict) and value:
            found[name] = {**value, rng.choice(sorted(value)): rng.choice(STRANGE)}
    return found


@pytest.mark.parametrize("seed", range(4))
def test_rows_broken_at_random_are_understood_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    lines = [vars(one) for one in read_rows() if isinstance(one, Row)]
    for _ in range(400):
        given = row(json.dumps(broken(rng.choice(lines), lines, rng)).encode(), 1)
        found = understand(given) if isinstance(given, Row) else given
        assert isinstance(found, (TruthCase, Kernel, Refused))
        assert not isinstance(found, Refused) or found.reason


def test_every_line_of_a_file_is_answered_for(tmp_path: Path) -> None:
    """Mark of byte order, ends of lines of other systems, an id twice, a line cut in two: counted
    and named, never dropped."""
    good = json.dumps(TRAINED)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + "\r\n".join([good, good, good[:70], "", "NaN", good.replace("made-1", "made-2")]).encode()
    )
    found = list(read(path))
    assert [one.id for one in found] == ["made-1", "made-1", "line 3", "line 5", "made-2"]
    assert [one.reason for one in found if isinstance(one, Refused)] == [
        "an id for the second time",
        "no JSON",
        "no JSON object",
    ]


def test_lines_that_are_no_rows_are_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(TRAINED), "{", "[]"]))
    assert main(["accuracy", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "2 lines of the file are no rows: line 2 (no JSON), line 3 (no JSON object)" in err
    assert "3 rows: 1 answered, 2 refused" in out
