"""Adapters in the formulas: which layers, in which dtype, what a forward keeps for them, and what
is refused. Sizes by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.core.tapes import LLAMA, alive, made, peak, sizes, tape_of

from memfit.errors import InputError
from memfit.job import Job
from memfit.model.families import build
from memfit.program import Program, placed
from memfit.simulate.memory import memory
from memfit.techniques import apply

T, D, F, V, KV, R = (
    2 * 128,
    256,
    512,
    1024,
    128,
    16,
)  # tokens, width, feed-forward, vocabulary, keys, rank
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def program(config: dict[str, Any] | None = None, **job: Any) -> Program:
    model = build(LLAMA if config is None else config)
    return apply(
        Program(
            model=model, job=Job(**job), entries=placed(model.layers, False), weights=model.dtype
        )
    )


def problems(config: dict[str, Any] | None = None, **job: Any) -> str:
    with pytest.raises(InputError) as caught:
        program(config, **job)
    return str(caught.value)


# ---------------------------------------------------------------------------------------- adapters
@pytest.mark.parametrize(
    ("job", "width"),
    [
        ({}, 4),
        ({"adapter_dtype": "base"}, 2),
        ({"versions": "peft=0.11"}, 2),
        ({"precision": "fp32", "adapter_dtype": "base"}, 4),
        ({"precision": "fp16-autocast"}, 4),
        ({"precision": "autocast-bf16"}, 4),
    ],
)
def test_dtype_of_adapters(job: dict[str, Any], width: int) -> None:
    """PEFT makes adapters fp32 over a 16-bit base from 0.12 on, unless told otherwise."""
    blocks = sizes(
        [
            block
            for block in made(tape_of(method="lora", targets="k_proj", **job), "prepare")
            if block.part == "weights"
        ]
    )
    assert blocks == {R * D * width: 3, KV * R * width: 3}


def test_all_linear() -> None:
    """Seven linear layers of each, and not the head."""
    blocks = [block for block in made(tape_of(method="lora"), "prepare") if block.part == "weights"]
    assert len(blocks) == 3 * 7 * 2
    assert not [block for block in blocks if "lm_head" in block.where]


@pytest.mark.parametrize(
    ("targets", "paths"),
    [
        ("q_proj", {"self_attn.q_proj"}),
        ("self_attn.q_proj, v_proj", {"self_attn.q_proj", "self_attn.v_proj"}),
        ("proj", set()),
        ("lm_head,down_proj", {"lm_head", "mlp.down_proj"}),
    ],
)
def test_targets_are_ends_of_paths(targets: str, paths: set[str]) -> None:
    if not paths:
        assert "no linear layer is named `proj`" in problems(method="lora", targets=targets)
        return
    made_for = {
        block.where
        for block in made(tape_of(method="lora", targets=targets), "prepare")
        if block.part == "weights"
    }
    assert {
        where.partition("layers.0.")[2] or where
        for where in made_for
        if "layers.0." in where or "layers" not in where
    } == paths


@pytest.mark.parametrize(
    ("job", "kept"),
    [
        # the input in fp32 for A, its product with A for B
        ({}, 4 * T * D + 4 * T * R),
        # with dropout: what it leaves, and its mask; the cast input itself goes
        ({"dropout": 0.1}, 4 * T * D + T * D + 4 * T * R),
        # adapters in the base's dtype take the norm's own output
        ({"adapter_dtype": "base"}, 2 * T * R),
        ({"adapter_dtype": "base", "dropout": 0.1}, 2 * T * D + T * D + 2 * T * R),
        # autocast casts the cast back, and keeps 16-bit copies of A and B
        ({"precision": "bf16-autocast"}, 2 * T * D + 2 * T * R + 2 * R * D + 2 * D * R),
        # rank-stabilised scaling changes nothing
        ({"rslora": True}, 4 * T * D + 4 * T * R),
    ],
)
def test_what_an_adapter_keeps(job: dict[str, Any], kept: int) -> None:
    blocks = alive(tape_of(method="lora", targets="q_proj", **job), "backward")
    mine = [
        block
        for block in blocks
        if block.where == "model.layers.1.self_attn.q_proj" and block.part == "activations"
    ]
    assert sum(block.size for block in mine) == kept


def test_gradients_and_states_are_the_adapters_alone() -> None:
    tape = tape_of(method="lora", targets="q_proj,o_proj")
    count = 3 * 2 * (R * D + D * R)
    assert (
        sum(block.size for block in alive(tape, "step") if block.part == "gradients") == 4 * count
    )
    assert (
        sum(block.size for block in alive(tape, "forward", 1) if block.part == "optimizer")
        == 8 * count
    )
    assert program(method="lora", targets="q_proj,o_proj").trainable == count


# --------------------------------------------------------------------------- modules trained whole
@pytest.mark.parametrize("tied", [False, True])
def test_saved_modules_are_copies(tied: bool) -> None:
    """The originals stay, frozen; a tied head becomes a matrix of its own."""
    config = {**LLAMA, "tie_word_embeddings": tied}
    tape = tape_of(config, method="lora", targets="q_proj", modules_to_save="embed_tokens,lm_head")
    weights = sizes([block for block in alive(tape, "forward") if block.part == "weights"])
    assert weights[2 * V * D] == (3 if tied else 4)
    assert (
        sizes([block for block in alive(tape, "step") if block.part == "gradients"])[2 * V * D] == 2
    )
    job = {"method": "lora", "targets": "q_proj", "modules_to_save": "embed_tokens,lm_head"}
    assert program(config, **job).trainable == 2 * V * D + 3 * 2 * R * D


def test_saved_modules_get_no_adapter() -> None:
    blocks = made(tape_of(method="lora", modules_to_save="mlp"), "prepare")
    feed = [block for block in blocks if ".mlp." in block.where]
    assert sizes(feed) == {2 * D * F: 3 * 3}


# ----------------------------------------------------------------------------------------- experts
@pytest.mark.parametrize(
    ("versions", "stacks", "separate"),
    [("", True, False), ("transformers=4.57", False, True), ("peft=0.18", False, False)],
)
def test_stacked_experts(versions: str, stacks: bool, separate: bool) -> None:
    """From transformers 5 and peft 0.19 on, all-linear means the stacks too: twice the rank where
    gate and up share one. Before transformers 5 each expert and the router are linear layers."""
    marked = program(MIXTRAL, method="lora", versions=versions)
    adapter = marked.adapter
    assert adapter is not None
    assert adapter.parameters == (
        (("down_proj", R), ("gate.weight", R), ("gate_up_proj", 2 * R)) if stacks else ()
    )
    attention = R * (4 * D + D + KV + KV + D)
    router = R * (D + 4)
    experts = 4 * (2 * R * (D + 2 * F) + R * (F + D)) + router if stacks else 0
    linear = 4 * 3 * R * (D + F) + router if separate else 0
    assert marked.trainable == 3 * (attention + experts + linear)


def test_a_replaced_stack_is_made_twice_and_kept_once() -> None:
    """W + s·B·A as large as the stack: when it is registered, and when it is used; the second stays
    for the products' gradients."""
    tape = tape_of(MIXTRAL, method="lora")
    stack = 2 * 4 * 2 * F * D
    assert sizes(made(tape, "forward", "layers.1.mlp.experts"), "baddbmm")[stack] == 2
    kept = [
        block
        for block in alive(tape, "backward")
        if block.op == "baddbmm" and block.where == "model.layers.1.mlp.experts"
    ]
    assert sizes(kept) == {stack: 1, stack // 2: 1}


# ----------------------------------------------------------------------------------- refused input
@pytest.mark.parametrize(
    ("config", "job", "text"),
    [
        (LLAMA, {"targets": "qproj"}, "no linear layer is named `qproj`"),
        (LLAMA, {"targets": "q_proj,mlp"}, "`mlp` is not a linear layer, so PEFT stops at it"),
        (LLAMA, {"targets": "q_proj,norm"}, "`norm` is not a linear layer, so PEFT stops at it"),
        (LLAMA, {"targets": "embed_tokens"}, "adapter on the embedding `embed_tokens`"),
        (LLAMA, {"targets": "layers.1.self_attn.q_proj"}, "names one layer"),
        (LLAMA, {"modules_to_save": "lm_haed"}, "no module's path ends with `lm_haed`"),
        (LLAMA, {"modules_to_save": "layers"}, "`layers` is the model itself"),
        (MIXTRAL, {"dropout": 0.1}, "PEFT does not support dropout on adapters of stacked experts"),
        (
            MIXTRAL,
            {"targets": "q_proj,w1"},
            "`w1` and `w3` are stored in one stack, `gate_up_proj`, and",
        ),
    ],
)
def test_refused(config: dict[str, Any], job: dict[str, Any], text: str) -> None:
    assert text in problems(config, method="lora", **job)


def test_everything_wrong_at_once() -> None:
    text = problems(method="lora", targets="nope,self_attn.zz", modules_to_save="nothing_like_it")
    assert text.count(" @ job.") == 3


def test_names_without_meaning_pass_beside_others() -> None:
    """As PEFT takes them: lists are shared between models."""
    assert program(method="lora", targets="q_proj,c_attn").trainable == 3 * 2 * R * D


# ----------------------------------------------------------------------------------- frozen models
def test_freeze_by_part_of_a_name() -> None:
    tape = tape_of(method="freeze", trainable="layers.2.mlp,norm")
    gradients = sizes([block for block in alive(tape, "step") if block.part == "gradients"])
    assert gradients == {2 * D * F: 3, 2 * D: 3 * 2 + 1}
    assert "contains any of `nothing`" in problems(method="freeze", trainable="nothing")


def test_freeze_of_some_layers_is_seen_in_compact_tapes() -> None:
    config = {**LLAMA, "num_hidden_layers": 9}
    tapes = [
        tape_of(config, compact, method="freeze", trainable="layers.7.", checkpointing="full")
        for compact in (False, True)
    ]
    assert memory(tapes[1], None).allocated == memory(tapes[0], None).allocated == peak(tapes[0])


# ------------------------------------------------------------------------------ checkpoints, merge
@pytest.mark.parametrize(
    ("versions", "reentrant", "leaf"),
    [
        ("", False, True),
        ("", True, True),
        ("transformers=4.57", False, False),
        ("transformers=4.57", True, True),
    ],
)
def test_when_the_embedding_becomes_a_leaf(versions: str, reentrant: bool, leaf: bool) -> None:
    """Its gradient is all that the first layer's base weights are multiplied for."""
    marked = program(method="lora", checkpointing="full", reentrant=reentrant, versions=versions)
    assert marked.input_gradients is leaf
    tape = tape_of(
        method="lora",
        targets="v_proj",
        checkpointing="full",
        reentrant=reentrant,
        versions=versions,
    )
    first = [
        block
        for block in made(tape, "backward", "layers.0.self_attn.q_proj")
        if block.part == "temporaries"
    ]
    assert bool(first) is leaf


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"checkpointing": "full"},
        {"modules_to_save": "lm_head", "dropout": 0.05},
        {"merge": True},
    ],
)
def test_compact_equals_flat(job: dict[str, Any]) -> None:
    config = {**LLAMA, "num_hidden_layers": 8}
    flat, compact = (tape_of(config, one, method="lora", **job) for one in (False, True))
    assert len(compact.events) < len(flat.events)
    assert memory(compact, None).allocated == memory(flat, None).allocated == peak(flat)


def test_merging_makes_the_product_and_its_scaled_copy() -> None:
    tape = tape_of(method="lora", targets="down_proj", merge=True)
    blocks = made(tape, "save", step=1)
    assert sizes(blocks) == {4 * D * F: 3 * 2}
    assert made(tape_of(method="lora"), "save", step=1) == []


def test_merging_stacks_takes_all_experts_at_once() -> None:
    """The product and its scaled copy in fp32, then in the stack's dtype, beside a copy of B by
    expert; three layers."""
    expected = Counter[int]()
    for stack, copied in ((4 * 2 * F * D, 2 * F * 4 * 2 * R), (4 * D * F, D * 4 * R)):
        expected[4 * stack] += 3 * 2
        expected[2 * stack] += 3
        expected[4 * copied] += 3
    assert (
        sizes(made(tape_of(MIXTRAL, method="lora", merge=True), "save", "mlp.experts", 1))
        == expected
    )
