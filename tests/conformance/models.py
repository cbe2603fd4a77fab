"""Models that are small and unlike each other, for comparisons of layouts: heads and widths that
ranks divide evenly, and not (`SPLIT`: those that tensor parallelism splits)."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 4001,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 3000,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "mistral": {
        "model_type": "mistral",
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "vocab_size": 600,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    },
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 3000,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 192,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": 3000,
        "n_positions": 1024,
        "tie_word_embeddings": True,
    },
}

SPLITTABLE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
OTHERWISE: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 64},
    "qwen2": {},
    "qwen2-tied": {},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 32},
    "gemma2-tied": {"head_dim": 32},
    "gemma3_text-tied": {"head_dim": 32},
    "granite": {},
    "cohere-tied": {},
    "smollm3": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
}
SPLIT: dict[str, dict[str, Any]] = {
    name: {
        **SPLITTABLE,
        "model_type": name.partition("-")[0],
        "tie_word_embeddings": name.endswith("-tied"),
        **more,
    }
    for name, more in OTHERWISE.items()
}
