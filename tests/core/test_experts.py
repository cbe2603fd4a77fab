"""What is said about experts in stacks, and what their routing weighs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from memfit.api.verbs import estimate
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.tape import Alloc, Tape

SMALL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "dtype": "bfloat16",
    "head_dim": 64,
}
OSS = {**SMALL, "model_type": "gpt_oss"}


def said(config: dict[str, Any], **options: Any) -> dict[str, tuple[str, str]]:
    answer = estimate(config, gpu="h100-sxm", seq=64, framework="transformers", **options)
    return {problem.where: (problem.level, problem.message) for problem in answer.problems}


def test_bitsandbytes_packs_no_stacks() -> None:
    level, message = said(SMALL, method="qlora")["job.quant"]
    assert level == "warning"
    assert "8" in message.partition("%")[0]
    assert "bitsandbytes does not quantize stacked experts: the" in message
    assert "bfloat16" in said(SMALL, method="qlora", prepare_kbit=False)["job.quant"][1]
    assert "bfloat16" in said(SMALL, task="inference", quant="nf4")["job.quant"][1]
    assert "job.versions" not in said(SMALL, method="qlora", versions="transformers=4.51")
    minimax = {**SMALL, "model_type": "minimax_m2"}
    alone = {"method": "qlora", "targets": "q_proj", "versions": "transformers=4.51"}
    assert "one by one" in said(minimax, **alone)["job.versions"][1]
    assert "job.quant" not in said({**SMALL, "model_type": "llama"}, method="qlora")


def test_all_linear_leaves_stacks_out_where_peft_does_not_know_them() -> None:
    assert said(OSS, method="lora")["job.targets"][0] == "note"
    assert "job.targets" not in said(OSS, method="lora", targets="q_proj,v_proj")
    assert "job.targets" not in said(SMALL, method="lora", targets="q_proj,v_proj")
    assert "job.targets" not in said(SMALL, method="lora", versions="transformers=4.51")
    minimax = {**SMALL, "model_type": "minimax_m2"}
    assert (
        "by itself" in said(minimax, method="lora", versions="transformers=4.51")["job.versions"][1]
    )
    phimoe = {**SMALL, "model_type": "phimoe"}
    answer = estimate(phimoe, gpu="h100-sxm", seq=64, framework="transformers", method="lora")
    assert any("leaves out `mlp.router`" in problem.message for problem in answer.problems)


def test_shares_weigh_only_where_experts_are_unpacked_in_parts() -> None:
    """fp8 stacks of more than a GiB in 16 bits: the part with the busiest expert holds its rows."""
    assert (
        "`router_skew` has no effect here: grouped expert matmuls"
        in said(SMALL, router_skew=2.0)["job.router_skew"][1]
    )
    wide = {
        **SMALL,
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "hidden_size": 4096,
        "moe_intermediate_size": 8192,
        "num_hidden_layers": 1,
        "decoder_sparse_step": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    job = Job(method="lora", targets="q_proj", seq=8192, batch=4, checkpointing="full")
    rows = [part_rows(lower(build(wide), job.replace(router_skew=skew))) for skew in (1.0, 8.0)]
    assert rows == [
        {2**15},
        {2**15 * 7 // 15 + 2**15, 2**15 * 8 // 15},
    ]  # of 2**16; the busiest one of 16 gets a half


def part_rows(tape: Tape) -> set[int]:
    """Of the products of a part of the experts, into a gradient that stands already."""
    made = [
        event
        for event in tape.events
        if isinstance(event, Alloc) and event.op in ("dequantize", "grouped_mm")
    ]
    parts = [
        after
        for before, after in pairwise(made)
        if before.op == "dequantize" and before.formula[0] == 8
    ]
    return {int(part.formula[0]) for part in parts}
