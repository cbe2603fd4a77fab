"""torchtitan's experts over ranks, worked out by hand from its sources (0.3.0): what is gathered
with what, what is sent, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.tape import Comm, Mark, Tape
from memfit.uses import strategy_from

D, F, E, K, LAYERS, ROWS, SEQ = 128, 96, 8, 2, 3, 2, 256
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": D,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2000,
    "num_experts": E,
    "num_experts_per_tok": K,
    "moe_intermediate_size": F,
    "tie_word_embeddings": False,
}


def tape(use: str, **options: Any) -> Tape:
    job = Job(
        framework="torchtitan",
        task="pretrain",
        batch=ROWS,
        seq=SEQ,
        attention="sdpa",
        clip=0.0,
        **options,
    )
    return lower(build(CONFIG), job, strategy_from(use.split(), None))


def first_forward(found: Tape) -> list[Comm]:
    out: list[Comm] = []
    phase = ""
    for event in found.events:
        if type(event) is Mark:
            if phase == "forward" and event.phase != "forward":
                return out
            phase = event.phase
        elif type(event) is Comm and phase == "forward":
            out.append(event)
    return out


def test_a_layer_is_gathered_with_its_experts_and_the_next_one_before_they_run() -> None:
    calls = first_forward(tape("fsdp=4 ep=2", precision="bf16"))
    kinds = [call.group if call.op == "all_gather" else call.op for call in calls]
    there, layer = ["all_to_all", "all_to_all"], ["fsdp", "efsdp"]
    assert kinds == [
        "fsdp",
        *layer,
        *layer,
        *there,
        *layer,
        *there,
        "fsdp",
        *there,
    ]  # the ends are units of their own
    experts = {call.size for call in calls if call.group == "efsdp"}
    assert experts == {3 * D * F * (E // 2) * 2}  # three matrices of half of the experts, in bf16
    dense = (
        D * (4 * 32 + 2 * 2 * 32) + 4 * 32 * D + E * D + 2 * D + 2 * 32
    )  # queries, keys and values; their way out; the router; norms
    assert dense * 2 in {call.size for call in calls if call.group == "fsdp"}


def test_every_choice_is_a_row_that_goes_and_comes_back() -> None:
    sizes = [
        call.size
        for call in first_forward(tape("fsdp=4 ep=2", precision="bf16"))
        if call.op == "all_to_all"
    ]
    assert sizes == [ROWS * SEQ * K * D * 2] * (2 * LAYERS)
    twice = [
        call.size
        for call in first_forward(tape("fsdp=4 ep=2,imbalance=2", precision="bf16"))
        if call.op == "all_to_all"
    ]
    assert twice == [2 * size for size in sizes]


@pytest.mark.parametrize(
    ("use", "options", "said"),
    [
        ("fsdp=16", {}, "not supported yet: 16 ranks for fewer experts in torchtitan"),
        ("tp=2", {}, "hint: use `fsdp` and `ep`"),
        ("ddp=4 ep=4", {}, "s expert parallelism without FSDP2"),
        ("fsdp=4 ep=2,fused", {}, "is Megatron's"),
        ("fsdp=2", {"checkpointing": "selective"}, "s selective checkpointing of experts"),
    ],
)
def test_what_has_no_formula_is_told(use: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        tape(use, **options)
