"""Frameworks with modelling code of their own: recorded peaks of the real code, and what their scripts cannot do."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.simulate.memory import Memory, memory

SMALL: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8192,
    "max_position_embeddings": 4096,
}  # fmt: skip
OLD = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"} | {"intermediate_size": 2048}
LARGE_HEADS = {**SMALL, "head_dim": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "tie_word_embeddings": False},
    "qwen2": {**SMALL, "tie_word_embeddings": False},
    "qwen3": {**SMALL, "tie_word_embeddings": False, "head_dim": 64},
    "gemma": {**LARGE_HEADS, "num_key_value_heads": 1},
    "gemma2": {**LARGE_HEADS, "sliding_window": 64},
    "gpt_neox": {**OLD, "rotary_pct": 0.25},
    "falcon": {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 8192},
    "phi": {**OLD, "partial_rotary_factor": 0.5},
}
EVERYWHERE = "q_proj,k_proj,v_proj,o_proj,dense,gate_proj,up_proj,down_proj,fc1,fc2,lm_head"
# What litgpt 0.5.13's own model and loop allocated at most under the recorder of tests/torch/test_litgpt.py: 2 x 512 tokens, SGD.
LITGPT = [
    ("llama", "full", "bf16", 271_732_736), ("llama", "full", "fp32", 379_202_560), ("llama", "full", "autocast-bf16", 346_172_416),
    ("qwen2", "full", "bf16", 271_738_880), ("qwen3", "full", "bf16", 292_876_288), ("gemma", "full", "bf16", 297_160_704),
    ("gemma2", "full", "bf16", 474_292_224), ("gpt_neox", "full", "bf16", 237_521_920), ("falcon", "full", "bf16", 221_387_776),
    ("phi", "full", "bf16", 233_368_576),
]  # fmt: skip
# The same with AdamW, and adapters of rank 8 on every linear layer and the head.
LITGPT_LORA = [("llama", 236_680_704), ("gemma", 262_305_280), ("phi", 218_196_480)]


def needs(name: str, framework: str, **fields: Any) -> Memory:
    model = build({"model_type": name, **CONFIGS[name]}, name=name)
    return memory(lower(model, Job(**{"framework": framework, "batch": 2, "seq": 512, **fields})))


@pytest.mark.parametrize(("name", "method", "precision", "real"), LITGPT)
def test_litgpt_allocates_what_its_own_code_does(name: str, method: str, precision: str, real: int) -> None:
    assert needs(name, "litgpt", method=method, precision=precision, optimizer="sgd").allocated == pytest.approx(real, rel=5e-5)


@pytest.mark.parametrize(("name", "real"), LITGPT_LORA)
def test_litgpt_adapters_allocate_what_its_own_code_does(name: str, real: int) -> None:
    assert needs(name, "litgpt", method="lora", rank=8, targets=EVERYWHERE).allocated == pytest.approx(real, rel=5e-5)


def test_litgpt_forgot_the_cap_of_logits_in_pieces() -> None:
    """Before 0.5.5 they kept no tanh: 2 bytes for each of 2 · 512 · 8192 logits."""
    fields = {"method": "lora", "targets": "q_proj,v_proj"}
    now, before = needs("gemma2", "litgpt", **fields), needs("gemma2", "litgpt", **fields, versions="litgpt=0.4")
    assert now.allocated - before.allocated == 2 * 2 * 512 * 8192


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"checkpointing": "full"}, "litgpt has no checkpointing `full`"),
        ("gpt_neox", {"method": "lora"}, "litgpt has adapters of their own for queries, keys and values"),
        ("llama", {"method": "qlora"}, "no formula for method `qlora` with litgpt"),
        ("llama", {"task": "inference"}, "no formula for generation with litgpt"),
    ],
)
def test_litgpt_refuses_what_it_has_no_formula_for(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        needs(name, "litgpt", **fields)


def test_torchtune_weighs_norms_in_fp32_since_0_5() -> None:
    """`F.rms_norm` keeps the normed values in fp32 where single steps kept them in bf16: two bytes a value more, in two norms of each of
    4 layers and the last, whose own input is kept anyway."""
    fields = {"loss": "plain", "optimizer": "sgd"}
    now, before = needs("llama", "torchtune", **fields), needs("llama", "torchtune", **fields, versions="torchtune=0.4")
    assert now.allocated - before.allocated == 9 * 2 * 512 * 512 * 2
