"""Small models of every kind of block, with what each is given in a training step: two layers, 64
wide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Given = Callable[[Any, int, int], dict[str, Any]]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
OLD = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000, "n_positions": 512}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    **MOE,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "model_type": "llama"},
    "llama-biased-tied": {
        **SMALL,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral-window": {**SMALL, "model_type": "mistral", "sliding_window": 32},
    "mixtral": {**SMALL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {**SMALL, "model_type": "qwen2"},
    "qwen2_moe": {
        **SMALL,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "shared_expert_intermediate_size": 64,
        **MOE,
    },
    "qwen3": {**SMALL, "model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {**SMALL, "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, **MOE},
    "gemma": {**SMALL, "model_type": "gemma", "head_dim": 16},
    "gemma2": {**SMALL, "model_type": "gemma2", "head_dim": 16, "sliding_window": 32},
    "gemma3_text": {**SMALL, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 32},
    "phi": {**SMALL, "model_type": "phi"},
    "phi3": {**SMALL, "model_type": "phi3", "pad_token_id": 0},
    "deepseek_v2": {
        **SMALL,
        "model_type": "deepseek_v2",
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        **MLA,
    },
    "deepseek_v3": {**SMALL, "model_type": "deepseek_v3", "n_group": 2, "topk_group": 1, **MLA},
    "gpt_oss": {
        **SMALL,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
    },
    "gpt2": {**OLD, "model_type": "gpt2"},
    "gpt_bigcode": {**OLD, "model_type": "gpt_bigcode"},
    "codegen": {**OLD, "model_type": "codegen", "rotary_dim": 8, "n_ctx": 512},
    "gptj": {**OLD, "model_type": "gptj", "rotary_dim": 8},
    "gpt_neo": {
        "model_type": "gpt_neo",
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 32,
    },
    "gpt_neox": {**SMALL, "model_type": "gpt_neox"},
    "opt": {
        "model_type": "opt",
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 64,
    },
    "bloom": {
        "model_type": "bloom",
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 1000,
    },
    "falcon": {
        "model_type": "falcon",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    },
    "mpt": {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 1000},
    "biogpt": {**SMALL, "model_type": "biogpt"},
    "olmo": {**SMALL, "model_type": "olmo"},
    "olmo2": {**SMALL, "model_type": "olmo2"},
    "granite": {**SMALL, "model_type": "granite"},
    "cohere": {**SMALL, "model_type": "cohere"},
    "stablelm": {**SMALL, "model_type": "stablelm"},
    "starcoder2": {**SMALL, "model_type": "starcoder2"},
    "glm": {**SMALL, "model_type": "glm", "head_dim": 16, "pad_token_id": 0},
    "smollm3": {**SMALL, "model_type": "smollm3", "pad_token_id": 0},
    "llama4_text": {
        **SMALL,
        "model_type": "llama4_text",
        "head_dim": 16,
        "num_local_experts": 4,
        "intermediate_size_mlp": 128,
        "pad_token_id": 0,
    },
    "mamba": {
        "model_type": "mamba",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
        "state_size": 8,
    },
    "qwen3_next": {
        **SMALL,
        "model_type": "qwen3_next",
        "head_dim": 16,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "num_hidden_layers": 4,
        **MOE,
        **LINEAR,
    },
}
# Attention beside recurrences; short sequences, because on a CPU their scans are loops over tokens.
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
# PEFT leaves the last projection of a scan alone and wants the others by name.
SCANS = {
    "mamba": ["in_proj", "x_proj"],
    "falcon_mamba": ["in_proj", "x_proj"],
    "mamba2": ["in_proj"],
    "falcon_h1": ["in_proj"],
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "mamba": CONFIGS["mamba"],
    "mamba2": {
        "model_type": "mamba2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
        "state_size": 8,
        "num_heads": 4,
        "head_dim": 32,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "falcon_mamba": {
        "model_type": "falcon_mamba",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
        "state_size": 8,
    },
    "jamba": {
        **SMALL,
        "model_type": "jamba",
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
        "pad_token_id": 0,
    },
    "bamba": {
        **SMALL,
        "model_type": "bamba",
        "attn_layer_indices": [1],
        "pad_token_id": 0,
        **MAMBA2,
    },
    "falcon_h1": {
        **SMALL,
        "model_type": "falcon_h1",
        "mamba_d_ssm": 128,
        "pad_token_id": 0,
        **MAMBA2,
    },
    "granitemoehybrid": {
        **SMALL,
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "pad_token_id": 0,
        **MAMBA2,
    },
    "recurrent_gemma": {
        **SMALL,
        "model_type": "recurrent_gemma",
        "num_hidden_layers": 3,
        "attention_window_size": 32,
        "lru_width": 64,
    },
    "lfm2": {
        **SMALL,
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"],
        "pad_token_id": 0,
    },
    "rwkv": {
        "model_type": "rwkv",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
        "attention_hidden_size": 64,
        "intermediate_size": 128,
    },
}
BERT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
T5 = {
    "model_type": "t5",
    "d_model": 64,
    "d_ff": 128,
    "d_kv": 16,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 1000,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
BART = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "dropout": 0.0,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
WHISPER = {
    **BART,
    "model_type": "whisper",
    "num_mel_bins": 16,
    "max_source_positions": 50,
    "max_target_positions": 128,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
TEXT = {**SMALL, "model_type": "llama", "head_dim": 16}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
LLAVA = {
    "model_type": "llava",
    "text_config": TEXT,
    "vision_config": CLIP,
    "image_token_index": 999,
}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {**SMALL, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 32},
    "vision_config": SIGLIP,
    "mm_tokens_per_image": 4,
    "image_token_index": 999,
}
PALIGEMMA = {
    "model_type": "paligemma",
    "text_config": {**SMALL, "model_type": "gemma", "head_dim": 16},
    "vision_config": {**SIGLIP, "projection_dim": 64},
    "image_token_index": 999,
    "projection_dim": 64,
}
QWEN2_VL = {
    "model_type": "qwen2_vl",
    "text_config": {
        **SMALL,
        "model_type": "qwen2_vl_text",
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    },
    "vision_config": {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 64,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 8,
    },
    "image_token_id": 999,
    "vision_start_token_id": 998,
    "vision_end_token_id": 997,
    "video_token_id": 996,
}


def tokens(model: Any, batch: int, seq: int) -> dict[str, Any]:
    ids, labels = (
        torch.randint(0, model.config.get_text_config().vocab_size, (batch, seq)) for _ in range(2)
    )
    return {"input_ids": ids, "labels": labels}


def pairs(model: Any, batch: int, seq: int) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(3, 1000, (batch, seq)),
        "labels": torch.randint(3, 1000, (batch, 24)),
    }


def sounds(model: Any, batch: int, seq: int) -> dict[str, Any]:
    return {
        "input_features": torch.randn(batch, 16, 100, dtype=model.dtype),
        "labels": torch.randint(3, 1000, (batch, 24)),
    }


def classes(model: Any, batch: int, seq: int) -> dict[str, Any]:
    return {
        "input_ids": torch.full((batch, seq), 5),
        "labels": torch.zeros(batch, dtype=torch.int64),
    }


def seen(tokens: int, marks: tuple[int, ...], kinds: str = "", **more: Any) -> Given:
    def give(model: Any, batch: int, seq: int) -> dict[str, Any]:
        ids = torch.full((batch, seq), 5)
        ids[:, : len(marks)] = torch.tensor(marks)
        inputs = {"input_ids": ids}
        if "image_grid_thw" in more:
            inputs["image_grid_thw"] = torch.tensor(more["image_grid_thw"] * batch)
            inputs["pixel_values"] = torch.randn(batch * 16, 3 * 2 * 8 * 8)
        else:
            inputs["pixel_values"] = torch.randn(batch, 3, 32, 32)
        if kinds:
            inputs[kinds] = (ids == 999).to(torch.int64)
        labels = torch.full((batch, seq), 5)
        labels[:, : len(marks)] = -100
        return {**inputs, "labels": labels}

    return give


def same(model: Any, batch: int, seq: int) -> dict[str, Any]:
    ids = torch.randint(3, 1000, (batch, seq))
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True, kw_only=True)
class Small:
    """`options` are the job's own for this model, `lora` what PEFT is told beside the rank."""

    config: dict[str, Any]
    builder: str = "AutoModelForCausalLM"
    given: Given = tokens
    options: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)


MODELS: dict[str, Small] = {
    **{name: Small(config=config) for name, config in CONFIGS.items()},
    **{
        name: Small(
            config=config,
            options={"seq": 16 if name in SCANS else 32},
            lora={"target_modules": SCANS[name]} if name in SCANS else {},
        )
        for name, config in HYBRIDS.items()
    },
    "bert": Small(
        config={**BERT, "model_type": "bert"},
        builder="AutoModelForMaskedLM",
        given=same,
        lora={"task_type": None},
    ),
    "roberta": Small(
        config={**BERT, "model_type": "roberta", "pad_token_id": 0},
        builder="AutoModelForMaskedLM",
        given=same,
        lora={"task_type": None},
    ),
    "bert-classes": Small(
        config={**BERT, "model_type": "bert"},
        builder="AutoModelForSequenceClassification",
        given=classes,
        options={"head": "classification"},
        lora={"task_type": "SEQ_CLS"},
    ),
    "llama-classes": Small(
        config={**SMALL, "model_type": "llama", "pad_token_id": 0},
        builder="AutoModelForSequenceClassification",
        given=classes,
        options={"head": "classification"},
        lora={"task_type": "SEQ_CLS"},
    ),
    "t5": Small(
        config=T5,
        builder="AutoModelForSeq2SeqLM",
        given=pairs,
        options={"target_seq": 24},
        lora={"task_type": "SEQ_2_SEQ_LM"},
    ),
    "bart": Small(
        config={**BART, "model_type": "bart"},
        builder="AutoModelForSeq2SeqLM",
        given=pairs,
        options={"target_seq": 24},
        lora={"task_type": "SEQ_2_SEQ_LM"},
    ),
    "whisper": Small(
        config=WHISPER,
        builder="AutoModelForSpeechSeq2Seq",
        given=sounds,
        options={"target_seq": 24},
        lora={"task_type": None},
    ),
    "llava": Small(
        config=LLAVA,
        builder="AutoModelForImageTextToText",
        given=seen(16, (999,) * 16),
        options={"images": 1},
    ),
    "gemma3": Small(
        config=GEMMA3,
        builder="AutoModelForImageTextToText",
        given=seen(4, (999,) * 4, "token_type_ids"),
        options={"images": 1},
    ),
    "paligemma": Small(
        config=PALIGEMMA,
        builder="AutoModelForImageTextToText",
        given=seen(16, (999,) * 16, "token_type_ids"),
        options={"images": 1},
    ),
    "qwen2_vl": Small(
        config=QWEN2_VL,
        builder="AutoModelForImageTextToText",
        given=seen(
            4, (998, 999, 999, 999, 999, 997), "mm_token_type_ids", image_grid_thw=[[1, 4, 4]]
        ),
        options={"images": 1, "image_size": 32},
    ),
}
