"""Weights as checkpoints store them, under the trace: their bytes, and beside the formulas."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.23")

from tests.torch.small_configs import small  # noqa: E402

import memfit  # noqa: E402
from memfit.model.quantized import format_at  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "dtype": "bfloat16",
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 128,
    "v_head_dim": 32,
    "vocab_size": 512,
    "dtype": "bfloat16",
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*"],
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
INFERENCE: dict[str, Any] = {"task": "inference", "seq": 128, "gpu": "h100-sxm"}


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        (LLAMA, FP8),
        (DEEPSEEK, FP8),
        (LLAMA, GPTQ),
        (LLAMA, NVFP4),
        (DEEPSEEK, NVFP4),
        (LLAMA, INT4),
        (DEEPSEEK, INT4),
    ],
)
def test_weights_are_those_of_the_formulas(config: Any, stored: Any) -> None:
    given = {**config, "quantization_config": stored}
    ours = memfit.estimate(given, by="formula", **INFERENCE)
    real = memfit.estimate(given, by="trace", **INFERENCE)
    assert real.parameters.total == ours.parameters.total
    assert abs(real.memory.parts["weights"] / ours.memory.parts["weights"] - 1) < 0.005
    plain = memfit.estimate(config, by="trace", **INFERENCE)
    assert real.memory.parts["weights"] < plain.memory.parts["weights"]


def test_adapters_over_fp8() -> None:
    given = {**LLAMA, "quantization_config": FP8}
    job: dict[str, Any] = {"method": "lora", "seq": 128, "gpu": "h100-sxm"}
    ours = memfit.estimate(given, by="formula", **job)
    real = memfit.estimate(given, by="trace", **job)
    assert real.parameters.trainable == ours.parameters.trainable
    assert abs(real.memory.parts["weights"] / ours.memory.parts["weights"] - 1) < 0.005


def test_nothing_trains_over_packed_experts() -> None:
    with pytest.raises(memfit.InputError, match="a trace cannot train on experts quantized by `"):
        memfit.estimate(
            {**small("jamba"), "quantization_config": GPTQ}, by="trace", method="lora", seq=64
        )


def test_int4_of_a_text_part_counts() -> None:
    """Kimi K2.5 says it of its text model."""
    inner = {key: value for key, value in DEEPSEEK.items() if key != "model_type"}
    whole = {**small("kimi_k25"), "dtype": "bfloat16"}
    given = {**whole, "text_config": {**inner, "quantization_config": INT4}}
    plain = {**whole, "text_config": inner}
    packed, full = (memfit.estimate(one, by="trace", **INFERENCE) for one in (given, plain))
    assert packed.parameters.total == full.parameters.total
    assert packed.memory.parts["weights"] < full.memory.parts["weights"]


def test_formats_listed_layer_by_layer() -> None:
    settings = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.block_sparse_moe.experts.3.w1": {"quant_algo": "NVFP4"},
            "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        },
    }
    found = {
        path: format_at(path, settings)
        for path in (
            "model.language_model.layers.0.mlp.experts",
            "model.layers.0.self_attn.q_proj",
            "model.layers.0.self_attn.k_proj",
            "model.vision_tower.layers.0.self_attn.q_proj",
        )
    }
    assert list(found.values()) == ["nvfp4", "float8_e4m3fn", "", ""]


@pytest.mark.parametrize(
    ("kind", "out"), [("mamba2", "out_proj"), ("llama4", "router"), ("llama4_text", "router")]
)
def test_all_linear_leaves_out_what_peft_does_not_adapt(kind: str, out: str) -> None:
    job: dict[str, Any] = {"method": "lora", "targets": "all-linear", "seq": 64}
    job["framework"] = "transformers"
    found = memfit.estimate(small(kind), by="trace", **job)
    said = [one.message for one in found.problems if "`all-linear` leaves out" in one.message]
    assert said
    assert f"`{out}`" in said[0]
    assert found.parameters.trainable


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "deepseek_v32", "deepseek_v4", "minimax_m3_vl"])
def test_long_answers_of_sparse_attention(kind: str) -> None:
    """What the layers cache beside keys and values is as long as the answer where its middle is
    skipped: the peak is that of every token generated."""
    from memfit.job import Job
    from memfit.simulate.memory import memory
    from memfit.trace import trace_config

    job = Job(task="inference", seq=96, new_tokens=48)
    quick, whole = (
        memory(trace_config(small(kind), job, decode_all=every)) for every in (False, True)
    )
    assert quick.parts.get("kv_cache") == whole.parts.get("kv_cache")
    assert abs(quick.allocated / whole.allocated - 1) < 0.005
