"""Publishers' words, one function and one table each: every spelling that a reader knows, and next
to it the one that means something else. What a word means is in the library that it is from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memfit.strategy import FSDP, ONE, TP, ZeRO
from memfit.truth import plain, words
from memfit.truth.case import Unfit
from memfit.truth.rows import Row

TRAINED: dict[str, Any] = {
    "engine": "transformers Trainer",
    "engine_version": "transformers 4.46.2, torch 2.5.1",
    "batch": 2,
    "seq": 512,
    "dtype": "bf16",
    "method": "full",
    "optimizer": "adamw_torch",
    "attention": "sdpa",
    "task": "train",
}


def made(**fields: Any) -> Row:
    return Row(id="x", source="acme/bench", **fields)


def said(function: Callable[..., Any], *given: Any) -> Any:
    """What it returns; of a refusal its detail, in a list."""
    try:
        return function(*given)
    except Unfit as refusal:
        return [refusal.detail]


def options(**changes: Any) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    return plain.options_of(made(**{**TRAINED, **changes}), notes), notes


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        *((text, "flash-attn-2") for text in ("flash_attention_2", "FA2", "fa-2", "Flash")),
        *((text, "flash-attn-3") for text in ("flash_attention_3", "flash-attn 3", "fa3")),
        *((text, "eager") for text in ("eager", " Eager ", "eager (Mistral's own)")),
        *((text, "sdpa") for text in ("", "SDPA", "with and without flash-attn")),
        *((text, "flash") for text in ("sdpa (flash)", "sdpa, flash-attn kernels")),
        *((text, "efficient") for text in ("mem-efficient", "sdpa, memory-efficient")),
        *((text, "math") for text in ("math", "sdpa (math)")),
        *((text, [text]) for text in ("eager attention", "xformers", "flex", "mathematics, fused")),
    ],
)
def test_attention(text: str, kernel: Any) -> None:
    assert said(words.attention, text) == kernel


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        *((text, "bf16") for text in ("bf16", "BFloat16 weights", "bf16, no autocast", "nf4")),
        *((text, "bf16") for text in ("bf16 autocast_adapter_dtype", "fp8", "gptq 4-bit bf16")),
        *((text, "fp16") for text in ("fp16", "float16", "16-true", "f16 half", "gptq 4-bit")),
        *((text, "fp32") for text in ("fp32", "float32", "32-true", "tf32")),
        *((text, "bf16-autocast") for text in ("bf16 autocast", "bf16 weights, mixed", "nf4 amp")),
        *((text, "fp16-autocast") for text in ("fp16 autocast", "amp, weights fp16")),
        *((text, "autocast-bf16") for text in ("mixed", "bf16 mixed", "fp32 weights, autocast")),
        *((text, "autocast-fp16") for text in ("fp16 amp", "weights float32, fp16 autocast")),
        # 32 bits beside 16 say something else: master weights, states, the loss
        *((text, "bf16") for text in ("bf16, fp32 states", "bf16 and not fp16")),
        ("fp16, fp32 states", "fp16"),
    ],
)
def test_precisions(text: str, precision: str) -> None:
    assert words.numbers(text)["precision"] == precision


@pytest.mark.parametrize(
    "text", ["", "not stated", "hqq", "bf16 int8dq", "mxfp4", "nvfp4", "aqlm", "marlin", "fp6"]
)
def test_a_dtype_that_is_not_stated_or_has_no_formula_is_refused(text: str) -> None:
    with pytest.raises(Unfit, match="dtype is not stated" if "no" in text or not text else "quant"):
        words.numbers(text)


@pytest.mark.parametrize(
    ("text", "quant"),
    [
        ("nf4", ("nf4", False)),
        ("nf4-dq", ("nf4", True)),
        ("nf4, double quantization", ("nf4", True)),
        ("fp4", ("fp4", False)),
        ("fp4 double", ("fp4", True)),
        ("bnb 4-bit", ("nf4", False)),
        ("4-bit base, double quant", ("nf4", True)),
        ("load_in_4bit", ("fp4", False)),  # BitsAndBytesConfig's default, transformers 4.46
        ("qlora, 4-bit", ("nf4", False)),
        ("4 bit qlora, double", ("nf4", True)),
        *(
            (text, ("int8", None))
            for text in ("bnb int8", "load_in_8bit", "llm.int8", "8-bit base")
        ),
        *((text, [text]) for text in ("int8", "4-bit", "q4 something")),
    ],
)
def test_weights_by_bitsandbytes(text: str, quant: Any) -> None:
    found = said(words.quantized, text)
    got = (found["quant"], found.get("double_quant")) if isinstance(found, dict) else found
    assert got == quant


def test_weights_that_are_not_quantized() -> None:
    assert words.quantized("bf16") == words.stored("bf16") == {}


@pytest.mark.parametrize(
    ("text", "bits", "group"),
    [
        ("gptq", 4, 128),
        ("GPTQ int4 g128", 4, 128),
        ("gptq 3-bit g=64", 3, 64),
        ("gptq 8bit groupsize 32", 8, 32),
        ("gptq w2 no group", 2, -1),
        ("awq g-1", 4, -1),
        ("awq g-", 4, -1),
    ],
)
def test_checkpoints_of_4_bits_say_their_groups(text: str, bits: int, group: int) -> None:
    found = words.stored(text)
    assert found == {
        "quant_method": "gptq" if "gptq" in text.lower() else "awq",
        "bits": bits,
        "group_size": group,
    }
    # Kernels are chosen for GPTQ alone
    kernels = words.stored(text, kernel="exllama")
    assert ("exllama_config" in kernels) == ("gptq" in text.lower())
    if "g" not in text.removeprefix("gptq").removeprefix("awq").lower():
        assert words.stored(text, "TheBloke/Llama-2-70B-GPTQ")["group_size"] == -1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((text, "adamw") for text in ("AdamW", "adam", "adamw_hf", "AdamW (foreach)")),
        *((text, "adamw") for text in ("torch's AdamW, not 8-bit", "AdamW fused=False")),
        *((text, "adamw_fused") for text in ("adamw_torch_fused", "AdamW, fused", "fused AdamW")),
        *((text, "adamw_8bit") for text in ("adamw_bnb_8bit", "8-bit AdamW", "bnb Adam 8bit")),
        *((text, "paged_adamw") for text in ("paged_adamw_32bit", "paged AdamW", "Paged Adam")),
        *((text, "paged_adamw_8bit") for text in ("paged 8-bit", "PagedAdamW8bit")),
        *((text, "sgd") for text in ("SGD", "sgd momentum=0", "SGD, momentum 0.0")),
        *((text, "sgd_momentum") for text in ("sgd momentum=0.9", "SGD with momentum")),
        *(
            (text, [text.lower() or "not stated"])
            for text in (
                "",
                "Adam-mini",
                "paged AdEMAMix of mine",
                "8-bit grokadamw",
                "adamw-like lomo",
            )
        ),
    ],
)
def test_optimizers(text: str, name: Any) -> None:
    assert said(words.optimizer, text) == name


@pytest.mark.parametrize(
    ("value", "found"),
    [
        *((value, "none") for value in (None, False, "none", "None (fits)", "no", "off", "0")),
        *((value, "none") for value in ("false", "disabled")),
        *(
            (value, "full")
            for value in (True, "full", "Full, each layer", "yes", "on", "1", "true")
        ),
        *((value, "full") for value in ("reentrant", "non-reentrant", "use_reentrant=false")),
        *((value, [value]) for value in ("selective", "offload", "nonexistent", "reentrant=2")),
    ],
)
def test_checkpointing(value: Any, found: Any) -> None:
    assert said(words.checkpointing, value) == found


@pytest.mark.parametrize("default", [True, False])
def test_checkpoints_are_reentrant_where_the_text_says_so(default: bool) -> None:
    for text in ("non-reentrant", "nonreentrant", "use_reentrant=False".lower()):
        assert words.reentrant(text, default) is False
    for text in ("reentrant", "use_reentrant=true"):
        assert words.reentrant(text, default) is True
    assert words.reentrant("full", default) is default


@pytest.mark.parametrize(
    ("seq", "found"),
    [
        (512, 512),
        ("~20 tokens", 20),
        ("longest 1034", 1034),
        ("2,048 (packed)", 2048),
        ("8k context", 8192),
        ("1024", 1024),
        ("1024 tokens" + " " * 188, 1024),  # 199 characters
        ("1024 tokens" + " " * 189, ["1024 tokens" + " " * 109]),
        ("~0 tokens", ["~0 tokens"]),
        ("0 tokens", ["0 tokens"]),
        ("~20, or ~30", ["~20, or ~30"]),
        ("512 and 1024 tokens", ["512 and 1024 tokens"]),
        ("1024 images", ["1024 images"]),
        ("up to 1024 tokens", ["up to 1024 tokens"]),
        ({"prompt": 7, "input": None}, 7),
        ({"other": 7}, ["None"]),
        (True, ["True"]),
    ],
)
def test_lengths(seq: Any, found: Any) -> None:
    assert said(words.length, seq) == found


@pytest.mark.parametrize(
    ("seq", "found"),
    [
        ({"prompt": 9, "output": 0}, (9, 0)),
        ({"prompt": 9, "output": "5"}, (9, 5)),
        ({"prompt": 9, "output": False}, ["False"]),
        ({"prompt": 9}, ["None"]),
        ("128 + 64 new", (128, 64)),
        ("128 + 64 new" + " " * 187, (128, 64)),  # 199 characters
        ("128 + 64 new" + " " * 188, ["128 + 64 new" + " " * 108]),
        (77, (77, 0)),
    ],
)
def test_prompts_and_answers(seq: Any, found: Any) -> None:
    got = said(words.lengths, made(seq=seq))
    assert (got if isinstance(got, list) else (got["seq"], got["new_tokens"])) == found


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (3, 3),
        ("3", 3),
        ("2 per device", 2),
        ("2 x 4 grad accum", 2),
        (0, ["0"]),
        ("a few", ["a few"]),
    ],
)
def test_batches(batch: Any, found: Any) -> None:
    assert said(words.batch, made(batch=batch)) == found


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ("full", "full"),
        ("full-parameter", "full"),
        ("LoRA r=8 q,v", ("lora", 8, "q_proj,v_proj", 0.05)),
        ("lora rank 16 all linear layers", ("lora", 16, "all-linear", 0.05)),
        ("QLoRA, r: 4, alpha=8, on mlp", ("qlora", 4, "gate_proj,up_proj,down_proj", 0.05)),
        ("qlora r=64 targets=['query', 'value']", ("qlora", 64, "query,value", 0.05)),
        ("rs-lora r=2 o", ("lora", 2, "o_proj", 0.05)),
        ("lora r=8 use_dora=false q", None),
        ("dora r=8 q", ["dora"]),
        ("loha r=8", ["loha"]),
        ("tuned, then lora r=8 q", ["tuned,"]),
        ("", ["not stated"]),
        ("lora of q and v", ["lora of q and v"]),
        ("lora r=8", [""]),
    ],
)
def test_adapters(method: str, found: Any) -> None:
    got = said(words.adapters, made(method=method, extra={"lora_dropout": "0.05"}))
    if isinstance(got, dict) and got["method"] != "full":
        got = got["method"], got["rank"], got["targets"], got["dropout"]
    if found is None:
        assert not isinstance(got, list)
    else:
        assert (got["method"] if isinstance(got, dict) else got) == found
    assert words.adapters(made(method="lora r=8 q"))["dropout"] == 0


def test_a_model_has_a_name_of_a_line() -> None:
    for name in ("", "x" * 200, None, 7):
        assert said(words.model, made(model=name)) == [str(name)[:120]]
    assert said(words.model, made(model="x" * 199)) == ["x" * 120]


# ------------------------------------------------------------------------- what nobody has said


@pytest.mark.parametrize(
    ("task", "method", "found"),
    [
        ("pretraining", "full", "pretrain"),
        ("pretraining", "lora r=8 q", "finetune"),
        ("train", "full", "finetune"),
        ("", "full", "finetune"),
        ("", "none", "inference"),
        ("", "", "inference"),
        ("generation", "lora r=8 q", "inference"),
        ("prefill", "none", "inference"),
        ("dpo", "full", ["dpo"]),
        ("eval", "none", ["eval"]),
    ],
)
def test_tasks(task: str, method: str, found: Any) -> None:
    got = said(plain.options_of, made(**{**TRAINED, "task": task, "method": method}), [])
    assert (got if isinstance(got, list) else got["task"]) == found


@pytest.mark.parametrize(
    ("version", "text", "reentrant"),
    [
        ("transformers 4.57.3", True, True),
        ("transformers 5.0.0", True, False),  # gradient_checkpointing_enable of modeling_utils.py
        ("transformers 5.0.0", "use_reentrant=true", True),
        ("transformers 4.57.3", "non-reentrant", False),
        ("transformers 4.57.3", "none", False),
    ],
)
def test_checkpoints_are_those_of_the_version(version: str, text: Any, reentrant: bool) -> None:
    found, _ = options(engine_version=version, grad_checkpointing=text)
    assert found["reentrant"] is reentrant


@pytest.mark.parametrize(
    ("engine", "dtype", "precision"),
    [
        ("axolotl", "bf16", "bf16-autocast"),
        ("LLaMA-Factory", "fp16", "fp16-autocast"),
        ("axolotl", "pure bf16", "bf16"),
        ("axolotl", "fp32", "fp32"),
        ("axolotl", "bf16 mixed", "autocast-bf16"),
        ("transformers", "bf16", "bf16"),
    ],
)
def test_trainers_that_run_under_autocast(engine: str, dtype: str, precision: str) -> None:
    found, notes = options(engine=engine, dtype=dtype)
    assert found["precision"] == precision
    assert any("under autocast" in note for note in notes) is (
        precision.endswith("-autocast") and "autocast" not in dtype
    )


def test_what_a_trainer_does_where_nothing_is_said() -> None:
    """`TrainingArguments`: max_grad_norm 1.0, optim adamw, one step each batch; a loop by hand
    does not clip, and torchtune has no default optimizer."""
    found, notes = options(optimizer=None, grad_checkpointing=None)
    assert (found["optimizer"], found["checkpointing"]) == ("adamw", "none")
    assert (found["clip"], found["accumulate"]) == (1.0, 1)
    assert [note.split(" is ")[0] for note in notes[-2:]] == [
        "the optimizer",
        "checkpointing",
    ]
    assert options(engine="hf, own loop")[0]["clip"] == 0.0
    assert options(engine="peft, looped twice")[0]["clip"] == 1.0
    for name in ("grad_accum", "gradient_accumulation_steps", "accumulation"):
        assert options(extra={name: "4"})[0]["accumulate"] == 4
    assert "clip" not in options(engine="torchtune")[0]
    with pytest.raises(Unfit, match="optimizer"):
        options(engine="torchtune", optimizer=None)
    stated = options(grad_checkpointing="none")[1]
    assert not any("not stated" in note for note in stated)


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"engine": "my engine"}, "my engine"),
        ({"engine": None}, "not stated"),
        ({"engine": "hf with Liger"}, "liger"),
        ({"extra": {"kernels": "unsloth"}}, "unsloth"),
        ({"extra": {"compile": True}}, "compile"),
        ({"engine": "hf, compiled"}, "compile"),
    ],
)
def test_engines_without_formula_are_named(changes: dict[str, Any], detail: str) -> None:
    assert said(plain.options_of, made(**{**TRAINED, **changes}), []) == [detail]


def test_the_dtype_of_qlora_may_stand_in_its_method() -> None:
    assert options(dtype="bf16", method="qlora nf4 r=8 q")[0]["quant"] == "nf4"
    assert "quant" not in options(dtype="bf16", method="lora (nf4 elsewhere) r=8 q")[0]


@pytest.mark.parametrize(
    ("parallel", "gpus", "found"),
    [
        ("", 1, ONE),
        ("single GPU", 1, ONE),
        ("", None, ONE),
        ("", 2, ["2 GPUs, and not how they share the work"]),
        ("none", 8, ["none"]),
        ("pp2", 2, ["pp2"]),
        ("tp3", 4, ["tp3"]),
        ("tp8", 4, ["tp8"]),
        ("something", 4, ["something"]),
        ("ddp4", 8, ["ddp4 on 8"]),
        ("fsdp3", 8, ["fsdp3 on 8"]),
        ("zero-3 offload", 4, ZeRO(size=4, stage=3, offload_optimizer="cpu", offload_param="cpu")),
        ("zero-2 offload", 4, ZeRO(size=4, stage=2, offload_optimizer="cpu", offload_param="none")),
        ("deepspeed zero 1", 2, ZeRO(size=2, stage=1)),
        ("fsdp", 2, FSDP(size=2, version=1, reshard=True)),
        ("fsdp2", 4, FSDP(size=4, version=2)),
        ("fsdp 2", 2, FSDP(size=2, version=1)),  # its ranks, where it is as many
        ("fsdp, shard_grad_op, offload", 2, FSDP(size=2, version=1, reshard=False, offload=True)),
        ("fsdp backward_pre", 2, FSDP(size=2, version=1, backward_prefetch="pre")),
        ("tp2", 2, TP(size=2)),
    ],
)
def test_layouts(parallel: str, gpus: int | None, found: Any) -> None:
    row = made(parallel=parallel, gpus=gpus, engine="accelerate", scope="one GPU")
    got = said(plain.strategy_of, row, [])
    if not isinstance(got, list) and found is not ONE:
        assert got.ddp is None
        got = got.fsdp or got.zero or got.tp
    assert got == found


def test_fsdp_without_a_version_is_that_of_the_engine() -> None:
    for engine, version in (("accelerate", 1), ("torchtitan", 2), ("torchtune", 2)):
        notes: list[str] = []
        found = plain.strategy_of(made(parallel="fsdp", gpus=2, engine=engine), notes)
        assert (found.fsdp and found.fsdp.version) == version
        assert [note.split()[0] for note in notes] == [f"FSDP{version}"]
        notes.clear()
        plain.strategy_of(made(parallel="fsdp2", gpus=4, engine=engine), notes)
        assert notes == []


def test_tensor_parallelism_beside_another_layout() -> None:
    found = plain.strategy_of(made(parallel="tp2, ddp", gpus=4, engine="hf"), [])
    assert (found.tp and found.tp.size, found.ddp and found.ddp.size) == (2, 2)
    found = plain.strategy_of(made(parallel="tp4, ddp", gpus=4, engine="hf"), [])
    assert (found.tp and found.tp.size, found.ddp) == (4, None)
    summed = made(parallel="ddp", gpus=4, engine="hf", scope="sum of all GPUs")
    assert said(plain.strategy_of, summed, []) == ["sum of all GPUs"]
    alone = made(parallel="", gpus=1, engine="hf", scope="sum of all GPUs")
    assert said(plain.strategy_of, alone, []) == ONE
