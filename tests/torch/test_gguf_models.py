"""Configs from GGUF metadata against transformers: the model they build has the parameters of the
model that was converted, name by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memfit.model.source import read
from memfit.model.sources.gguf_config import ARCHITECTURES

gguf = pytest.importorskip("gguf")

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {
    "vocab_size": 96,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 128,
    "n_inner": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}

# A case: architecture of llama.cpp, model_type, what differs from BASE, metadata that the converter
# adds beyond the usual.
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", "llama", {}, {}),
    (
        "llama",
        "llama",
        {"head_dim": 24, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {},
    ),
    ("llama", "mixtral", LOCAL, {}),
    ("qwen2", "qwen2", {"tie_word_embeddings": True}, {}),
    (
        "qwen2moe",
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 112},
        {"expert_shared_feed_forward_length": 112},
    ),
    ("qwen3", "qwen3", {"head_dim": 32}, {}),
    ("qwen3moe", "qwen3_moe", EXPERTS | {"head_dim": 32}, {}),
    ("gemma", "gemma", {"head_dim": 32}, {}),
    ("gemma2", "gemma2", {"head_dim": 32, "sliding_window": 16}, {"attention.sliding_window": 16}),
    (
        "gemma3",
        "gemma3_text",
        {"head_dim": 32, "sliding_window": 16},
        {"attention.sliding_window": 16},
    ),
    (
        "phi2",
        "phi",
        {"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
        {"rope.dimension_count": 8},
    ),
    ("phi3", "phi3", {}, {"rope.dimension_count": 16, "attention.sliding_window": 0}),
    ("deepseek2", "deepseek_v2", MLA | {"q_lora_rank": None}, {}),
    ("deepseek2", "deepseek_v2", MLA | {"q_lora_rank": 20}, {}),
    ("deepseek2", "deepseek_v3", MLA | {"q_lora_rank": 20}, {"expert_gating_func": 2}),
    (
        "gpt-oss",
        "gpt_oss",
        LOCAL | {"head_dim": 32, "sliding_window": 16},
        {"expert_feed_forward_length": 80, "attention.sliding_window": 16},
    ),
    ("gpt2", "gpt2", GPT, {}),
    ("starcoder", "gpt_bigcode", GPT | {"multi_query": True}, {"attention.head_count_kv": 1}),
    (
        "gptneox",
        "gpt_neox",
        {"rotary_pct": 0.25, "num_key_value_heads": None},
        {"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    ("bloom", "bloom", {"n_layer": 4, "n_head": 4}, {"attention.head_count": 4, "block_count": 4}),
    (
        "falcon",
        "falcon",
        {"num_kv_heads": 4, "bias": False},
        {"attention.head_count_kv": 4},
    ),  # multi-query, as the 7B says it
    (
        "falcon",
        "falcon",
        {"num_kv_heads": 2, "new_decoder_architecture": True},
        {"attention.head_count_kv": 2},
    ),
    (
        "falcon",
        "falcon",
        {"num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        {"attention.head_count_kv": 2},
    ),
    ("starcoder2", "starcoder2", {}, {}),
    (
        "stablelm",
        "stablelm",
        {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
        {"rope.dimension_count": 4},
    ),
    ("stablelm", "stablelm", {"use_parallel_residual": True}, {"rope.dimension_count": 4}),
    ("olmo", "olmo", {"clip_qkv": 8.0}, {"attention.clamp_kqv": 8.0}),
    ("olmo2", "olmo2", {}, {}),
    ("olmoe", "olmoe", {"num_experts": 8, "num_experts_per_tok": 2}, {}),
    ("granite", "granite", {"attention_bias": True}, {}),
    ("granitemoe", "granitemoe", LOCAL, {}),
    (
        "granitemoe",
        "granitemoeshared",
        LOCAL | {"shared_intermediate_size": 56},
        {"expert_shared_feed_forward_length": 56},
    ),
    ("command-r", "cohere", {}, {}),
    ("command-r", "cohere", {"use_qk_norm": True}, {}),
    ("smollm3", "smollm3", {}, {}),
    ("seed_oss", "seed_oss", {"head_dim": 32}, {}),
    ("arcee", "arcee", {}, {}),
]
# Written under the architecture's prefix where the config has the key
# (TextModel.set_gguf_parameters of the converter).
USUAL = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "attention.key_length": ("head_dim",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Parameters of the transformers model of a config, tied ones once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import torch

    settings = {
        key: value
        for key, value in config.items()
        if key not in ("model_type", "quantization_config")
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **settings)
        )
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def metadata(config: Any, case: tuple[str, str, dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """What the converter would write, from the full config of transformers."""
    values = {
        key: next(
            (getattr(config, name) for name in names if getattr(config, name, None) is not None),
            None,
        )
        for key, names in USUAL.items()
    }
    if case[0] == "deepseek2":
        values |= {
            "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
            "attention.value_length": config.kv_lora_rank,
            "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length_mla": config.v_head_dim,
            "attention.kv_lora_rank": config.kv_lora_rank,
            "attention.q_lora_rank": config.q_lora_rank,
            "attention.head_count_kv": 1,
            "rope.dimension_count": config.qk_rope_head_dim,
            "leading_dense_block_count": config.first_k_dense_replace,
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_weights_norm": config.norm_topk_prob,
        }
    elif "head_dim" not in case[2]:
        values.pop("attention.key_length")  # written only where config.json has it
    if case[1] == "falcon":
        values["feed_forward_length"] = 4 * config.hidden_size
    return {key: value for key, value in (values | case[3]).items() if value is not None}


def converted(
    path: Path, case: tuple[str, str, dict[str, Any], dict[str, Any]]
) -> dict[str, tuple[int, ...]]:
    """Write the model of a case as GGUF, tensor names by the package's own map; its parameters in
    transformers' words."""
    import numpy
    from transformers import AutoConfig

    architecture, model_type, changed, _ = case
    settings = changed if "n_embd" in changed else BASE | changed
    config = AutoConfig.for_model(
        model_type,
        **{
            key: value
            for key, value in settings.items()
            if value is not None or key == "q_lora_rank"
        },
    )
    parameters = shapes(
        {
            "model_type": model_type,
            **{
                key: value
                for key, value in settings.items()
                if value is not None or key == "q_lora_rank"
            },
        }
    )
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata(config, case).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[
            type(value)
        ]
        add(f"{architecture}.{key}", value)
    for key, token in (("bos", 1), ("eos", 2), ("padding", 0)):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)
    kind = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, 4)
    written = set()
    for name, shape in parameters.items():
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if (
            new is not None and new not in written
        ):  # experts are fused otherwise than in the file; metadata tell of them
            writer.add_tensor(new, numpy.zeros(shape, dtype=numpy.float32))
            written.add(new)
    assert {"token_embd.weight", "output_norm.weight"} <= written or architecture == "olmo"
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return parameters


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{case[0]}-{case[1]}-{index}" for index, case in enumerate(CASES)]
)
def test_the_config_of_a_file_builds_the_model_that_was_converted(
    tmp_path: Path, case: tuple[str, str, dict[str, Any], dict[str, Any]]
) -> None:
    path = tmp_path / "model.gguf"
    expected = converted(path, case)
    config = dict(read(path).config)
    assert config["model_type"] == case[1]
    assert shapes(config) == expected


def test_every_architecture_has_a_case() -> None:
    twins = {
        "qwen2vl": "qwen2",
        "qwen3vl": "qwen3",
    }  # the text half of a model that has its own case
    assert {twins.get(name, name) for name in ARCHITECTURES} == {case[0] for case in CASES}
    for name, twin in twins.items():
        assert ARCHITECTURES[name] == ARCHITECTURES[twin]


THEIRS = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "gpt-oss", "qwen2moe")


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case[0] in THEIRS and case[1] != "mixtral"],
    ids=lambda case: case[1],
)
def test_transformers_reads_the_same_from_the_same_file(
    tmp_path: Path, case: tuple[str, str, dict[str, Any], dict[str, Any]]
) -> None:
    """Its own GGUF loader, where it knows the architecture. It cannot tell biases and head sizes
    that no key says; those are left out."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = tmp_path / "model.gguf"
    converted(path, case)
    theirs = load_gguf_checkpoint(str(path))["config"]
    ours = read(path).config
    shared = set(theirs) & set(ours) - {"head_dim", "norm_topk_prob"}
    assert {
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "tie_word_embeddings",
        "model_type",
    } <= shared
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
