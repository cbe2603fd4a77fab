"""Options as other tools spell them: on the command line, in job files and in Python."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from memfit.api.engine_plan import OF_A_PLAN
from memfit.api.question import question
from memfit.api.serving import Answering
from memfit.cli import main
from memfit.cli.commands import commands
from memfit.errors import InputError, Problem
from memfit.job import Job
from memfit.optimizers import OPTIMIZERS
from memfit.option_values import field_problems, from_text
from memfit.spellings import SPELLINGS, meanings, plain
from memfit.units import parse_bytes
from memfit.uses import strategy_from
from memfit.words.options import Studying, options

MODEL = "Qwen/Qwen3-0.6B"
FIELDS: dict[str, dataclasses.Field[Any]] = {
    **{one.name: one for one in dataclasses.fields(Studying)},
    **options(),
}


# ----------------------------------------------------------------------------------- the table
def test_every_spelling_belongs_to_an_option() -> None:
    serving = {one.name for one in dataclasses.fields(Answering)}
    assert set(SPELLINGS) <= {*FIELDS, *serving, *OF_A_PLAN}


def test_a_spelling_means_one_thing() -> None:
    own = {name.replace("_", "-") for name in options()}
    several: dict[str, set[str]] = {}
    for option, one in SPELLINGS.items():
        if option in options():
            for name in one.also if one.unless not in options() else ():
                assert name not in own, f"`{name}` is an option itself"
                several.setdefault(name, set()).add(option)
    assert {name: found for name, found in several.items() if len(found) > 1} == {}


@pytest.mark.parametrize("option", [name for name in SPELLINGS if name in Job.__dataclass_fields__])
def test_every_value_is_one_that_the_option_takes(option: str) -> None:
    one, rule = SPELLINGS[option], FIELDS[option]
    flags = [value for pair in one.flags.values() for value in pair if value is not None]
    for value in (*one.values.values(), *flags):
        read = from_text(value, str(rule.type)) if isinstance(value, str) else value
        assert list(field_problems(rule, read)) == [], value
        assert option != "optimizer" or value in OPTIMIZERS


# ----------------------------------------------------------------------------- what people type
def read(*words: str) -> dict[str, Any]:
    """The options that `memfit estimate` gets for `words`."""
    command = commands.get_command(None, "estimate")  # type: ignore[arg-type]
    assert command is not None
    context = command.make_context("estimate", [MODEL, *words])
    assert context.params["words"] == (MODEL,)
    skipped = ("words", "as_json", "form", "explain")
    return {
        name: value
        for name, value in context.params.items()
        if value not in (None, (), False, "") and name not in skipped
    }


@pytest.mark.parametrize(
    ("typed", "options"),
    [
        ("--lora", {"method": "lora"}),
        ("--qlora --lora-r 64", {"method": "qlora", "rank": "64"}),
        ("--per-device-train-batch-size 4", {"batch": "4"}),
        ("--per_device_train_batch_size=4", {"batch": "4"}),
        ("--gradient-checkpointing", {"checkpointing": "full"}),
        ("--gradient_checkpointing true", {"checkpointing": "full"}),
        ("--gradient_checkpointing False", {"checkpointing": "none"}),
        ("--max-seq-length 8k", {"seq": "8192"}),
        ("--context 1M", {"seq": "1048576", "task": "inference"}),
        ("-c 32K", {"seq": "32768"}),
        ("--load-in-4bit", {"quant": "nf4"}),
        ("--attn-implementation flash_attention_2", {"attention": "flash-attn-2"}),
        ("--optim adamw_torch_fused", {"optimizer": "adamw_fused"}),
        ("--dtype bfloat16", {"precision": "bf16"}),
        ("--use-liger-kernel", {"loss": "liger", "liger": True}),
        ("-tp 4", {"use": ("tp=4",)}),
        ("--tensor-parallel-size 4 --pp 2", {"use": ("tp=4", "pp=2")}),
        ("--zero-stage 3", {"use": ("zero,stage=3",)}),
        ("--fsdp", {"use": ("fsdp",)}),
        ("--fsdp 8", {"use": ("fsdp=8",)}),
        ("--do-eval", {"evaluate": True}),
        ("--gpus 4 --gpu h100", {"gpu": "4xh100"}),
        ("--gpu h100 --nproc-per-node 8", {"gpu": "8xh100"}),
        ("--4bit", {"quant": "nf4"}),
        ("--int4", {"quant": "nf4"}),
        ("--int8", {"quant": "int8"}),
        ("--inference --max-new-tokens 256", {"task": "inference", "new_tokens": "256"}),
        ("--lora --method lora", {"method": "lora"}),
        ("--head sequence-classification", {"head": "classification"}),
        ("--task-type TOKEN_CLS", {"head": "token-classification"}),
        ("--task_type SEQ_2_SEQ_LM", {"head": "seq2seq-lm"}),
        ("--head fill-mask", {"head": "masked-lm"}),
    ],
)
def test_flags_of_other_tools(typed: str, options: dict[str, Any]) -> None:
    assert read(*typed.split()) == options


def test_the_model_may_be_a_flag() -> None:
    command = commands.get_command(None, "estimate")  # type: ignore[arg-type]
    assert command is not None
    for typed in (["--model", MODEL], [f"--model_name_or_path={MODEL}"], ["-m", MODEL]):
        assert command.make_context("estimate", typed).params["words"] == (MODEL,)


def test_a_study_takes_the_options_of_an_estimate() -> None:
    command = commands.get_command(None, "study")  # type: ignore[arg-type]
    assert command is not None
    typed = [MODEL, "--gpu", "8xa100", "--seq", "2k,8k", "--method", "lora"]
    given = command.make_context("study", typed).params
    assert (given["gpus"], given["lengths"], given["methods"]) == ("8xa100", "2048,8192", "lora")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--gpu a100 --gpu h100", "`--gpu` is given twice: `a100` and `h100`"),
        ("--gpu a100 --gpus h100", "`--gpu a100` and `--gpus h100` contradict each other"),
        ("--lora --method full", "`--lora` and `--method full` contradict each other"),
        ("--bf16", "`--bf16` is ambiguous"),
        ("--tp", "`--tp` needs a value"),
        ("--batchh 2", f"try: memfit estimate {MODEL} --batch 2"),
        ("--batchh=2", f"try: memfit estimate {MODEL} --batch=2"),
        ("--python /x", "`memfit trace` has it"),
        ("--packing --no-packing", "`--packing` and `--no-packing` contradict each other"),
        ("--gpu --lora", "`--gpu` needs a value"),
        ("--gpu p4d.24xlarge --num-gpus 8", "contradict each other"),
        ("--lr 1e-4 --gpu t4 --verbose", f"try: memfit estimate {MODEL} --gpu t4\n"),
        ("--weight-decay 0.1", "Adam and SGD copy the gradients"),
        ("--top-p 0.9", "greedy decoding is assumed"),
        ("--users 4", "`memfit plan` has it"),
        ("--ttft 4s", "`memfit plan` has it"),
        ("--deepspeed zero3", "use `--use zero,stage=3`"),
        ("--search x", "see `memfit estimate --help`"),
        ("--method dpo", "`dpo` is not supported yet"),
        ("--trainer axolotl", "the nearest is `--framework trl`"),
        ("--framework unsloth", "--framework trl --unsloth norms,rotary,loss,adapters"),
        ("h100", f"try: memfit estimate {MODEL} --gpu h100"),
        ("--gpus 4", "write it like `4xh100`"),
        ("--gpu none", "hint: for any other card"),
        ("--method lorra", f"try: memfit estimate {MODEL} --method lora"),
        ("--gpus 8xrtx-4091 --optim adamx", f"try: memfit estimate {MODEL} --gpus 8xrtx-4090"),
    ],
)
def test_what_cannot_be_read_says_what_to_type(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", MODEL, *typed.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


@pytest.mark.parametrize(
    "typed",
    [
        ("--trust_remote_code", MODEL, "--gpu", "t4"),
        ("--do-train", "true", MODEL, "--gpu", "t4"),
        ("--learning_rate", "1e-4", MODEL, "--overwrite_output_dir", "--gpu", "t4"),
        ("--weight-decay", "0.1", MODEL, "--gpu", "t4"),
    ],
)
def test_what_is_left_of_a_command_has_its_model(
    typed: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A switch takes no value with it, however it is spelled."""
    assert main(["estimate", *typed]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"try: memfit estimate {MODEL} --gpu t4"


def test_a_job_file_and_python_take_the_same_spellings(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: {MODEL}\nlora_r: 8\nmax_seq_length: 4k\nload_in_4bit: true\n"
        "gradient_checkpointing: true\nuse_peft: true\noptim: adamw_torch\n"
    )
    job = question(str(path), {"per_device_train_batch_size": 3, "lora": True}, []).job
    assert (job.rank, job.seq, job.quant, job.method) == (8, 4096, "nf4", "lora")
    assert (job.checkpointing, job.batch, job.optimizer) == ("full", 3, "adamw")


def test_a_key_without_effect_is_to_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: {MODEL}\nlearning_rate: 1e-4\n")
    with pytest.raises(InputError, match="`learning_rate` does not change GPU memory"):
        question(str(path), {}, [])


def test_two_spellings_of_one_option_may_not_differ() -> None:
    problems: list[Problem] = []
    given = {"seq": 2048, "max_length": 4096, "batch": 1, "micro_batch_size": 1}
    assert plain(given, options(), problems) == {"seq": 2048, "batch": 1}
    assert [one.message for one in problems] == [
        "`seq` and `max_length` set `seq` to different values"
    ]


def test_an_option_of_one_name_is_no_spelling_of_another() -> None:
    assert "gpus" not in meanings(frozenset(("gpus", "gpu")))


# -------------------------------------------------------------------------------------- numbers
def test_memory_without_a_unit_is_gib() -> None:
    assert parse_bytes("24") == 24 * 2**30
    assert parse_bytes("0.5") == 2**29
    assert parse_bytes(str(2**34)) == 2**34


@pytest.mark.parametrize(("text", "number"), [("8k", 8000), ("1.5M", 1_500_000), ("2_000", 2000)])
def test_counts_may_have_a_suffix(text: str, number: int) -> None:
    assert from_text(text, "int") == number


def test_several_layouts_in_one_word() -> None:
    assert strategy_from(["tp=4,pp=2"], 8) == strategy_from(["tp=4", "pp=2"], 8)
    whole = strategy_from(["tensor_parallel=4,pipeline=2"], 8)
    assert whole == strategy_from(["tp=4", "pp=2"], 8)
    assert strategy_from(["context=2"], 2) == strategy_from(["cp=2"], 2)
    inside = strategy_from(["tp=4", "ep=4,tensor=1"], 4)
    assert (inside.size("tp"), inside.ep and inside.ep.tensor) == (4, 1)
    assert strategy_from(["zero=4,stage=3,tp=2"], 8) == strategy_from(["zero=4,stage=3", "tp=2"], 8)
    with pytest.raises(InputError, match="`tp` is given twice"):
        strategy_from(["tp=4,tp=2"], 8)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("zero3", "zero,stage=3"),
        ("ZeRO-2=8", "zero=8,stage=2"),
        ("zero_3,offload-optimizer=cpu", "zero,stage=3,offload-optimizer=cpu"),
        ("fsdp1=8", "fsdp=8,version=1"),
        ("fsdp2", "fsdp"),
    ],
)
def test_layouts_with_their_number_in_the_name(typed: str, meant: str) -> None:
    assert strategy_from([typed], 8) == strategy_from([meant], 8)


def test_hardware_that_is_not_supported_is_named_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["gpus", "tpu"]) == 2
    assert "XLA plans the memory of TPUs" in capsys.readouterr().err
    assert main(["report", "gpt2"]) == 2
    assert "see `memfit report --help`" in capsys.readouterr().err
