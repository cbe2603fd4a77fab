"""Experts of transformers before 5: linear layers of their own, which bitsandbytes packs and PEFT
adapts."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.api.verbs import estimate
from memfit.job import job_from
from memfit.lower import lower
from memfit.lower.moe.separate import shares
from memfit.model.families import build
from memfit.model.modules import Linear
from memfit.program import Program, placed
from memfit.tape import Alloc
from memfit.techniques import marked
from memfit.techniques.separate_experts import SEPARATE

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "dtype": "bfloat16",
    "first_k_dense_replace": 0,
    "moe_layer_start_index": 0,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 256,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 8),
}


def config(family: str) -> dict[str, Any]:
    return {**SMALL, "model_type": family}


def program(family: str, transformers: str, **options: Any) -> Program:
    model = build(config(family))
    job = job_from({"seq": 64, "versions": f"transformers={transformers},peft=0.17", **options})
    entries = placed(model.layers, False)
    return marked(Program(model=model, job=job, entries=entries, weights=model.dtype))[0]


def of_experts(found: Program) -> list[Linear]:
    return [one for one in found.model.layers[-1].linears() if ".experts." in one.name]


@pytest.mark.parametrize("family", SEPARATE)
def test_every_expert_is_packed_and_adapted_before_5(family: str) -> None:
    found = program(family, "4.57", framework="transformers", method="qlora")
    names = SEPARATE[family]
    experts = of_experts(found)
    assert [one.name for one in experts[:3]] == [
        f"{names.block}.experts.0.{end}" for end in (names.gate, names.up, names.down)
    ]
    assert len(experts) == 24
    assert all(found.quantized(one, f"model.layers.1.{one.name}") for one in experts)
    assert all(found.adapted(one) for one in experts)
    routers = [one for one in found.model.layers[-1].linears() if one.name.endswith(".gate")]
    assert bool(routers) == names.linear
    assert found.model.parameters == build(config(family)).parameters
    assert found.model.active == build(config(family)).active


@pytest.mark.parametrize("family", SEPARATE)
def test_stacks_stay_from_5_on(family: str) -> None:
    assert not of_experts(program(family, "5.0", framework="transformers", method="full"))


@pytest.mark.parametrize("family", SEPARATE)
@pytest.mark.parametrize(
    "options",
    [
        {"method": "full"},
        {"method": "lora", "checkpointing": "full"},
        {"method": "qlora"},
        {"task": "inference", "quant": "nf4", "new_tokens": 2},
    ],
    ids=str,
)
def test_every_job_runs_expert_after_expert(family: str, options: dict[str, Any]) -> None:
    job = job_from({"seq": 64, "versions": "transformers=4.57,peft=0.17", **options})
    tape = lower(build(config(family)), job.replace(framework="transformers"))
    where = {event.where for event in tape if type(event) is Alloc}
    for number in range(8):
        assert any(f"{SEPARATE[family].block}.experts.{number}." in one for one in where)


def test_adapters_of_mixtral_and_its_weights_in_four_bits() -> None:
    """Mixtral 8x7B by hand: D 4,096, K/V 1,024, F 14,336, 8 experts, 32 layers, V 32,000."""
    answer = estimate(
        "mixtral-8x7b",
        gpu="h200",
        framework="transformers",
        method="qlora",
        checkpointing="full",
        versions="transformers=4.46,peft=0.13",
    )
    width, keys, inner, experts, layers, vocabulary, rank = 4096, 1024, 14336, 8, 32, 32000, 16
    sides = [(width, width), (width, keys), (width, keys), (width, width), (width, experts)]
    sides += experts * [(width, inner), (width, inner), (inner, width)]
    packed = layers * sum(a * b for a, b in sides)
    adapters = layers * rank * sum(a + b for a, b in sides)
    whole = 2 * vocabulary * width + (2 * layers + 1) * width  # fp32: prepared for k-bit training
    # a byte has two values; 64 share a scale of a byte, 256 scales one of 4 bytes
    by_hand = packed * (1 / 2 + 1 / 64 + 4 / 64 / 256) + 4 * (whole + adapters)
    assert answer.parameters.trainable == adapters
    weights = answer.memory.parts["weights"]
    assert weights == pytest.approx(by_hand, rel=0.01)
    assert 25e9 < weights < 27e9


def test_rows_of_the_busiest_expert_take_memory() -> None:
    assert shares(64, 8, 1.0, 32) == [8] * 8
    assert shares(65, 8, 1.0, 33)[0] == 9
    assert shares(64, 8, 3.0, 32) == [24, *[6] * 5, 5, 5]
    assert shares(64, 8, 8.0, 32)[0] == 32  # a token chooses an expert once
    assert shares(2, 8, 1.0, 1) == [1, 1, *[0] * 6]
    assert sum(shares(1000, 7, 2.5, 500)) == 1000

    def peak(active: int = 2, **options: Any) -> int:
        job = {"seq": 2048, "batch": 4, "versions": "transformers=4.57", **options}
        asked = {**config("mixtral"), "num_experts_per_tok": active}
        return estimate(asked, gpu="h200", framework="transformers", **job).memory.allocated

    prompt = {"task": "inference", "logits": "last", "new_tokens": 1}
    assert peak(**prompt, router_skew=4.0) > 1.05 * peak(**prompt)
    assert peak(active=4, method="lora") > 1.3 * peak(method="lora")
