"""Which head SFTTrainer runs, by version, and what each takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memfit.api.question import question
from memfit.errors import InputError
from memfit.job import Job
from memfit.libraries.trl.check import head_of
from memfit.lower import lower
from memfit.model.families import build
from memfit.simulate.memory import memory
from memfit.tape import Alloc
from memfit.uses import strategy_from

WORDS = 50_000
LLAMA = {
    "model_type": "llama",
    "vocab_size": WORDS,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TRL: dict[str, Any] = {"framework": "trl", "batch": 4, "seq": 1024, "optimizer": "sgd"}


@pytest.mark.parametrize(
    ("version", "options", "head"),
    [
        ("1.3", {}, "plain"),
        ("1.4", {}, "plain"),
        ("1.4", {"loss": "chunked"}, "chunked"),
        ("1.6", {}, "chunked"),
        ("1.14", {}, "chunked"),
        ("1.14", {"liger": True}, "plain"),
        ("1.14", {"loss": "liger"}, "plain"),
        ("1.15", {}, "fused"),
        ("1.16", {"loss": "chunked"}, "fused"),
        ("1.16", {"framework": "transformers"}, "plain"),
        ("1.16", {"task": "inference"}, "plain"),
    ],
)
def test_which_head_a_version_has(version: str, options: dict[str, Any], head: str) -> None:
    assert head_of(Job(**{**TRL, "versions": f"trl={version}", **options})) == head


def blocks(version: str, **options: Any) -> list[tuple[str, int]]:
    tape = lower(build(LLAMA), Job(**{**TRL, "versions": f"trl={version}", **options}))
    return [(event.op, event.size) for event in tape.events if isinstance(event, Alloc)]


def test_the_fused_head_holds_one_tile() -> None:
    """4096 rows of 32768 columns, and the weight's gradient in fp32 before it is cast; no logits of
    all tokens."""
    found = blocks("1.16")
    assert ("empty", 4092 * 32768 * 2) in found
    assert ("zeros", WORDS * 192 * 4) in found
    assert max(size for op, size in found if op != "parameter") == 4092 * 32768 * 2


def test_before_torch_2_8_its_products_are_of_fp32_copies() -> None:
    tile = ("float", 4092 * 32768 * 4)
    assert tile not in blocks("1.16")
    assert tile in blocks("1.16", versions="trl=1.16,torch=2.7")


def test_the_chunked_head_multiplied_fp32_copies_until_1_13() -> None:
    copy = ("to", WORDS * 192 * 4)
    assert copy in blocks("1.12")
    assert copy not in blocks("1.13")
    assert ("linear", 256 * WORDS * 4) in blocks("1.12")
    assert ("linear", 256 * WORDS * 2) in blocks("1.13")


def test_heads_take_less_than_all_logits() -> None:
    peaks = [
        memory(lower(build(LLAMA), Job(**TRL, versions=f"trl={version}"))).allocated
        for version in ("1.3", "1.14", "1.16")
    ]
    assert peaks[1] < peaks[2] < peaks[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"framework": "transformers", "loss": "chunked"},
            "transformers has no chunked loss; torchtune and TRL have one",
        ),
        ({"versions": "trl=1.3", "loss": "chunked"}, "no chunked loss before 1.4"),
        ({"loss": "liger"}, "s loss"),
        (
            {"method": "lora", "targets": "lm_head"},
            "s weight directly, so an adapter on it would not be trained",
        ),
        ({"method": "qlora", "quant_skip": "q_proj"}, "hint: add `lm_head`"),
    ],
)
def test_what_no_head_can_do_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lower(build(LLAMA), Job(**{**TRL, **options}))


@pytest.mark.parametrize("version", ["1.14", "1.16"])
@pytest.mark.parametrize(
    "layout",
    [
        "ddp=2",
        "fsdp=2",
        "fsdp=2,version=1",
        "zero=2,stage=2",
        "zero=2,stage=3",
        "tp=2",
        "cp=2 fsdp=1",
    ],
)
def test_a_head_works_under_layouts_and_takes_less_than_all_logits(
    layout: str, version: str
) -> None:
    config, strategy = {**LLAMA, "head_dim": 64}, strategy_from(layout.split(), None)
    own, plain = (
        memory(lower(build(config), Job(**{**TRL, "versions": f"trl={one}"}), strategy)).allocated
        for one in (version, "1.3")
    )
    assert own < plain


def test_a_weight_that_is_cut_is_gathered_whole() -> None:
    """Two ranks with half of the rows each: all of them for the loss, fp32 sums of all, and of
    those this rank's half."""
    tape = lower(build(LLAMA), Job(**TRL), strategy_from(["tp=2"], None))
    found = [(event.op, event.size) for event in tape.events if isinstance(event, Alloc)]
    assert ("all_gather", WORDS * 192 * 2) in found
    assert ("zeros", WORDS * 192 * 4) in found
    assert ("clone", WORDS * 192) in found


@pytest.mark.parametrize(("rank", "rows"), [(0, 4 * 511), (1, 4 * 512)])
def test_the_last_token_of_a_sequence_has_no_label(rank: int, rows: int) -> None:
    """Labels come shifted where the sequence is split; of two ranks of a ring the first has the
    late end."""
    strategy = replace(strategy_from(["cp=2", "fsdp=1"], None), rank=rank)
    found = [
        event
        for event in lower(build({**LLAMA, "head_dim": 64}), Job(**TRL), strategy).events
        if isinstance(event, Alloc)
    ]
    assert {
        event.size for event in found if event.op == "index" and event.part == "activations"
    } >= {rows * 192 * 2, rows * 8}


def test_a_layout_that_trls_trainer_has_not_is_named_with_the_defaults() -> None:
    asked = {"gpu": "4xh100-sxm", "use": "pp=4", "batch": 2}
    (note,) = question("Qwen/Qwen3-0.6B", asked, []).notes
    assert "TRL's trainer has no `pp`" in note.message
    assert "--framework transformers --seq 2048" in note.hint  # `batch` is given
