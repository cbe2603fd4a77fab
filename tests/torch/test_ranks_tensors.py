"""Tensor and sequence parallelism of one rank, by DTensor and by transformers' own plan: what is
split, sent and held."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.job import Job
from memfit.tape import Alloc, Comm, Mark, Tape, check
from memfit.uses import strategy_from

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

LAYERS, D, F, V, T = 2, 64, 176, 512, 32
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
MATRICES, NORMS = (
    LAYERS * (2 * D * D + D * D + 3 * D * F) + 2 * V * D,
    (2 * LAYERS + 1) * D,
)  # values; keys and values are half as wide


def traced(use: str, config: Any = LLAMA, **job: Any) -> Tape:
    from memfit.trace import trace_config

    tape = trace_config(
        config, Job(**{"batch": 1, "seq": T, **job}), strategy=strategy_from(use.split(), None)
    )
    check(tape)
    return tape


def loaded(tape: Tape) -> int:
    """Bytes of weights that are there before the first step."""
    stop = next(
        place
        for place, event in enumerate(tape)
        if isinstance(event, Mark) and event.phase == "forward"
    )
    return sum(
        event.size
        for event in tape.events[:stop]
        if isinstance(event, Alloc) and event.part == "weights"
    )


def sent(tape: Tape, phase: str) -> Counter[str]:
    """How often each collective is called in one phase of the steady step."""
    found: Counter[str] = Counter()
    now = ("", 0)
    for event in tape:
        if isinstance(event, Mark):
            now = (event.phase, event.step)
        elif isinstance(event, Comm) and now == (phase, 1):
            found[event.op] += 1
    return found


@pytest.mark.parametrize("style", ["dtensor", "transformers"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_matrices_are_split_and_norms_are_not(style: str, ranks: int) -> None:
    assert loaded(traced(f"tp={ranks},style={style}")) == 2 * (MATRICES // ranks + NORMS)


def test_sums_over_the_ranks() -> None:
    """Forward: the rows' sums (2 a layer, 1 of the embedding); backward: one for every linear layer
    that is split by columns."""
    tape = traced("tp=2")
    assert sent(tape, "forward")["all_reduce"] == 2 * LAYERS + 1
    assert sent(tape, "backward")["all_reduce"] == 5 * LAYERS + 1
    assert sent(tape, "forward")["all_gather_into_tensor"] == 1  # the logits


def test_a_split_sequence_is_gathered_and_scattered() -> None:
    tape = traced("tp=2,sequence=yes")
    forward = sent(tape, "forward")
    assert forward["reduce_scatter_tensor"] == 2 * LAYERS + 1
    assert forward["all_gather_into_tensor"] == 2 * LAYERS + 2
    assert forward["all_reduce"] == 0
    sizes = {
        event.size
        for event in tape
        if isinstance(event, Comm) and event.op == "reduce_scatter_tensor"
    }
    assert sizes == {2 * T * D}
    assert {(event.group, event.ranks) for event in tape if isinstance(event, Comm)} == {("tp", 2)}


def test_a_loss_on_split_logits_never_holds_them_whole() -> None:
    whole = {"dtensor": 0, "loss": 0}
    for name, use in (("dtensor", "tp=2"), ("loss", "tp=2,parallel_loss=yes")):
        whole[name] = max(
            event.size
            for event in traced(use)
            if isinstance(event, Alloc)
            and event.part != "workspace"
            and event.where in ("", "lm_head")
        )
    assert whole["dtensor"] >= 4 * T * V > whole["loss"]


def test_what_is_sent_is_held_until_it_is_waited_for_and_nothing_stays() -> None:
    """Between steps there are weights, gradients' and states' blocks and workspaces, no operands of
    collectives."""
    for use in ("tp=2", "tp=2,sequence=yes", "tp=2,style=transformers", "tp=2,sequence=yes fsdp=2"):
        tape = traced(use)
        live: dict[int, Alloc] = {}
        for event in tape:
            if isinstance(event, Mark) and (event.phase, event.step) == ("step", 1):
                break
            if isinstance(event, Alloc):
                live[event.id] = event
            elif hasattr(event, "streams"):
                live.pop(event.id, None)
        assert {one.part for one in live.values()} <= {
            "weights",
            "gradients",
            "optimizer",
            "workspace",
            "inputs",
            "buffers",
        }


def test_with_fsdp_every_shard_is_split_again() -> None:
    half = loaded(traced("tp=2,sequence=yes"))
    assert loaded(traced("tp=2,sequence=yes fsdp=2")) == half // 2


@pytest.mark.parametrize(
    ("use", "job", "part"),
    [
        ("tp=8", {}, "8 ranks do not divide 4 key/value heads"),
        (
            "tp=2",
            {"method": "lora"},
            "adapters on layers that are split by rows: `down_proj`, `o_proj`",
        ),
        (
            "tp=2,style=dtensor",
            {"method": "lora", "targets": "q_proj"},
            "torch's parallel styles do not shard PEFT's layers; PEFT supports tran",
        ),
        (
            "tp=2",
            {"method": "qlora", "targets": "q_proj"},
            "bitsandbytes weights cannot be sharded: transformers' DTensors lose th",
        ),
        ("tp=2 ddp=2", {}, "DDP does not support DTensors"),
        ("tp=2,style=megatron", {}, "not Megatron's"),
        ("gemini=2", {}, "layout `gemini`"),
        ("fsdp=2", {"task": "inference"}, "training"),
    ],
)
def test_what_cannot_be_run_is_refused(use: str, job: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=part):
        traced(use, **job)
