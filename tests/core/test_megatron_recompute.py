"""Megatron's selective recomputation, module by module: what a layer keeps less of, worked out by
hand from megatron-core's sources (0.16.1), and what is there again in the backward and gone behind
it."""

from __future__ import annotations

import dataclasses

import pytest
from tests.core.test_megatron_experts import (
    CLUSTER,
    JOB,
    experts_by_hand,
    kept,
    model,
    router_by_hand,
)

from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower, programmed
from memfit.simulate.memory import memory
from memfit.strategy import DDP, EP, PP, TP, Strategy
from memfit.tape import Alloc, Free, Mark, Tape, check

TOKENS, WIDTH, INNER, DENSE, EXPERTS, CHOSEN = 256, 256, 64, 512, 16, 4
ROWS = TOKENS * CHOSEN  # each expert's capacity, from all
PADDED = Strategy(
    ddp=DDP(size=8, distributed=True), ep=EP(size=1, capacity=1.0, padded=True, fused=True)
)
SHARED = 3 * INNER * TOKENS * 2  # gate, up, and their product
NONE, MOE = 0, 2  # layers: without experts, with them
LESS = {
    ("mlp", NONE): TOKENS * (WIDTH + 3 * DENSE) * 2
    + TOKENS * 4,  # what its norm gave, a root a row, gate and up, their product
    ("mlp", MOE): 0,  # only layers without experts (transformer_layer.py)
    ("moe_act", NONE): 0,
    ("moe_act", MOE): ROWS * INNER * 2,  # what the activation gave
    ("shared_experts", MOE): SHARED,
    ("layernorm", NONE): TOKENS
    * WIDTH
    * 2,  # before attention; that of the feed-forward is one with its product
    ("layernorm", MOE): 2 * TOKENS * WIDTH * 2,
    # all behind the norm: the router, the map back in 32 bits, experts, the shared one
    ("moe", MOE): router_by_hand(TOKENS, grouped=False, padded=True)
    + TOKENS * (2 * EXPERTS + 1) * 4
    + experts_by_hand(ROWS, 1)
    + SHARED,
    ("moe,moe_act,shared_experts", MOE): router_by_hand(TOKENS, grouped=False, padded=True)
    + TOKENS * (2 * EXPERTS + 1) * 4
    + experts_by_hand(ROWS, 1)
    + SHARED,
    ("moe_act,layernorm,shared_experts", MOE): ROWS * INNER * 2 + 2 * TOKENS * WIDTH * 2 + SHARED,
}


def selective(modules: str) -> Job:
    return dataclasses.replace(JOB, checkpointing="selective", recompute_modules=modules)


@pytest.mark.parametrize(("modules", "layer"), list(LESS))
def test_what_a_layer_keeps_less(modules: str, layer: int) -> None:
    before, after = (
        kept(lower(model(), job, PADDED, CLUSTER), layer) for job in (JOB, selective(modules))
    )
    assert before - after == LESS[modules, layer]


def test_its_own_default_is_the_core_of_attention() -> None:
    named, default = (
        lower(model(), selective(modules), PADDED, CLUSTER) for modules in ("core_attn", "")
    )
    assert named.events == default.events


def alive(tape: Tape) -> int:
    """Bytes when the last step begins."""
    sizes: dict[int, int] = {}
    found = 0
    for event in tape.events:
        if type(event) is Alloc:
            sizes[event.id] = event.size
        elif type(event) is Free:
            sizes.pop(event.id, None)
        elif type(event) is Mark and event.phase == "step":
            found = sum(sizes.values())
    return found


@pytest.mark.parametrize(
    "modules",
    [
        "mlp",
        "moe",
        "moe_act",
        "shared_experts",
        "layernorm",
        "moe_act,layernorm,core_attn,mlp,shared_experts",
    ],
)
def test_all_that_is_made_again_goes_again(modules: str) -> None:
    plain, found = (lower(model(), job, PADDED, CLUSTER) for job in (JOB, selective(modules)))
    check(found)
    assert alive(found) == alive(plain)
    remade = [event for event in found.events if type(event) is Alloc and event.op == "recompute"]
    assert bool(remade) == ("layernorm" in modules or "moe_act" in modules)


@pytest.mark.parametrize("modules", ["moe", "moe_act,layernorm,shared_experts", "mlp,core_attn"])
def test_compact_tapes_agree(modules: str) -> None:
    strategy = Strategy(
        tp=TP(size=2, sequence=True), ddp=DDP(size=4, distributed=True), ep=EP(size=4, fused=True)
    )
    short, flat = (
        memory(
            lower(
                model(num_hidden_layers=8), selective(modules), strategy, CLUSTER, compact=compact
            )
        )
        for compact in (True, False)
    )
    assert short.parts == flat.parts
    assert short.reserved == flat.reserved


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ("mla_up_proj", "not supported yet: recomputing the up-projection of latent"),
        ("moe_acts", "Megatron cannot recompute a module `moe_acts`"),
    ],
)
def test_what_cannot_be_is_told(modules: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        lower(model(), selective(modules), PADDED, CLUSTER)


@pytest.mark.parametrize("layers", [1, 3])
def test_of_blocks_the_first_layers_keep_their_input_alone(layers: int) -> None:
    """transformer_block.py _checkpointed_forward, `block`: what a layer gives out is what the next
    one keeps."""
    some, every, none = (
        lower(
            model(),
            dataclasses.replace(JOB, checkpointing=how, recompute_layers=first),
            PADDED,
            CLUSTER,
        )
        for how, first in (("full", layers), ("full", 0), ("none", 0))
    )
    for layer in range(4):
        assert kept(some, layer) == kept(every if layer < layers else none, layer)
    assert kept(every, 0) < kept(none, 0)


def test_blocks_are_counted_in_each_turn_of_a_stage() -> None:
    pp = PP(size=2, schedule="interleaved", virtual=2, micro_batches=4)
    job = dataclasses.replace(JOB, checkpointing="full", recompute_layers=1)
    found = programmed(
        model(num_hidden_layers=8), job, CLUSTER, Strategy(pp=pp, ddp=DDP(size=1)), True
    )
    assert [(entry.number, entry.recompute) for entry in found.entries] == [
        (0, True),
        (1, False),
        (4, True),
        (5, False),
    ]
