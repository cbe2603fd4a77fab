"""A small configuration for every model type of transformers: its own defaults, with as few layers
as show every kind of layer."""

from __future__ import annotations

import re
from typing import Any

DEPTH = re.compile(
    r"num_hidden_layers|n_layers?|num_layers|.*num_.*layers|encoder_layers|decoder_layers|depth|.*_depth"
)
LAYERS = 2
Values = dict[str, Any]

GLM = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [8, 12, 12],
}
# Names of codes as the tokenizers have them, in the places where the published models keep them.
CHAMELEON = {
    "<image>": 8711,
    **{
        f"IMGIMG{''.join(chr(65 + int(digit)) for digit in str(code))}Z": 4 + code
        for code in range(8192)
    },
}
EMU3 = {
    "<image>": 151649,
    "<|extra_200|>": 151846,
    **{f"<|visual token {code:06d}|>": 151854 + code for code in range(32768)},
}
# What the defaults lack or contradict; a dictionary changes the part of that name.
OWN: dict[str, Values] = {
    "aria": {"vision_config": {"image_size": 980, "patch_size": 14}},
    "aya_vision": {"vision_config": {"num_attention_heads": 16, "image_size": 364}},
    "bamba": {"attn_layer_indices": [1]},
    "blip-2": {"image_token_index": 50265},
    "chameleon": {"vocabulary_map": CHAMELEON},
    "cohere_asr": {"decoder_start_token_id": 7},
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
        }
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {
            "encoder_config": {
                "hidden_size": 896,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
            }
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0, 1]}},
    "diffusion_gemma": {
        "text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704}
    },
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": EMU3},
    "encoder-decoder": {"decoder_start_token_id": 2, "pad_token_id": 1},
    "esm": {"vocab_size": 64, "pad_token_id": 1, "mask_token_id": 32},
    "gemma3": {"mm_tokens_per_image": 49},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "gemma4_unified": {"vision_config": {"model_type": "gemma4_unified_vision"}},
    "glm46v": {"text_config": {"rope_parameters": GLM}},
    "glm4v": {"text_config": {"rope_parameters": GLM}},
    "glm4v_moe": {"text_config": {"rope_parameters": GLM, "head_dim": 128}},
    "glmga": {"text_config": {"rope_parameters": GLM}},
    "granite4_vision": {
        "downsample_rate": "4/8",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "vision_feature_select_strategy": "full",
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 16},
        "image_grid_pinpoints": [[384, 768], [768, 384]],
    },
    "granitemoehybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [16, 16, 16, 16],
            },
        },
    },
    "idefics3": {"vision_config": {"image_size": 256}},
    "instructblip": {"image_token_index": 32000},
    "instructblipvideo": {"video_token_index": 32000},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "janus": {"vision_config": {"projection_dim": 4096}},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_hidden_layers": 2,
        "num_dense_layers": 1,
    },
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}},
    "longt5": {"decoder_start_token_id": 0},
    "minicpm_ocr": {"image_token_id": 248056},
    "minicpmv4_6": {"image_token_id": 248056},
    "minicpmv4_7": {"image_token_id": 248056},
    "ministral": {"head_dim": 128},
    "mllama": {"vision_config": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 3840}},
    "molmo2": {"adapter_config": {"text_hidden_size": 4096}},
    "moonshine": {"pad_token_id": 2},
    "moonshine_streaming": {"num_key_value_heads": 8, "decoder_start_token_id": 1},
    "mra": {"max_position_embeddings": 64},  # of which it sees no more blocks than there are
    "nemotron": {"num_key_value_heads": 8},
    "nemotron_h_omni": {"image_token_id": 18},
    "ovis2": {"hidden_size": 4096},
    "pop2piano": {"decoder_start_token_id": 0},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 151652},
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}},
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 256,
            "indexer_budget": 512,
            "indexer_compress_ratio": 4,
        }
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 512,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8]},
    "shieldgemma2": {"mm_tokens_per_image": 49},
    "smolvlm": {"vision_config": {"image_size": 256}},
    "speech-encoder-decoder": {"decoder_start_token_id": 2, "pad_token_id": 1},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "switch_transformers": {"decoder_start_token_id": 0},
    "t5": {"decoder_start_token_id": 0},
    "t5gemma2": {"encoder": {"vision_config": {"image_size": 896, "patch_size": 14}}},
    "udop": {"decoder_start_token_id": 0},
    "vipllava": {"vision_feature_layer": [-2, -1]},
    "vision-encoder-decoder": {"decoder_start_token_id": 2, "pad_token_id": 1},
    "xmod": {"default_language": "en_XX"},
}

# Without these there is no configuration.
NEEDED: dict[str, Values] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    }
}
# What is changed after layers were left out.
DRAFT = {
    "num_hidden_layers": 7,
    "layer_types": [*["sliding_attention"] * 5, *["full_attention"] * 2],
    "num_kv_shared_layers": 1,
    "per_layer_config": {"06": {"head_dim": 512}},
}
AFTER: dict[str, Values] = {
    "gemma4_unified_assistant": {
        "text_config": DRAFT
    },  # by its defaults no layer makes the cache that all others use
    "zamba": {
        "num_hidden_layers": 10,
        "layer_types": [*["linear_attention"] * 2, "hybrid"] * 3 + ["linear_attention"],
    },
}


def small(kind: str) -> Values:
    """The configuration of `kind` as a dictionary; whole where a smaller one is refused."""
    from transformers import CONFIG_MAPPING

    whole = fitted(
        merged(CONFIG_MAPPING[kind](**NEEDED.get(kind, {})).to_dict(), OWN.get(kind, {}))
    )
    cut = merged(shrunk(whole), AFTER.get(kind, {}))
    try:
        CONFIG_MAPPING[kind](**{key: value for key, value in cut.items() if key != "model_type"})
    except Exception:  # noqa: BLE001 - whatever it is, the trace of the whole one will tell
        cut = whole
    return {**cut, "model_type": kind}


def fitted(values: Values) -> Values:
    """A vision tower ends as wide as the text model is."""
    text, tower = values.get("text_config"), values.get("vision_config")
    if text and tower and "hidden_size" in text and "out_hidden_size" in tower:
        return merged(values, {"vision_config": {"out_hidden_size": text["hidden_size"]}})
    return values


def merged(values: Values, changes: Values) -> Values:
    found = dict(values)
    for key, value in changes.items():
        found[key] = (
            merged(found[key], value)
            if isinstance(value, dict) and isinstance(found.get(key), dict)
            else value
        )
    return found


def shrunk(values: Values) -> Values:
    """With fewer layers: two, or as many as it takes until each kind that a list of layers names
    has been seen."""
    lists = [
        one
        for one in values.values()
        if isinstance(one, list) and one and all(isinstance(item, (str, int)) for item in one)
    ]
    depths = {value for key, value in values.items() if counts(key, value)}
    keep = {
        depth: min(depth, max([LAYERS, *(seen(one) for one in lists if len(one) == depth)]))
        for depth in depths
    }
    found: Values = {}
    for key, value in values.items():
        if (
            isinstance(value, dict)
            and value
            and all(str(one).isdigit() for one in value)
            and depths
        ):
            value = {one: item for one, item in value.items() if int(one) < keep[max(depths)]}
        elif isinstance(value, dict):
            value = shrunk(value)
        elif isinstance(value, list) and len(value) in keep and len(value) > 8:
            value = value[: keep[len(value)]]
        elif counts(key, value):
            value = keep[value]
        found[key] = value
    return found


def counts(key: Any, value: Any) -> bool:
    return (
        isinstance(key, str)
        and isinstance(value, int)
        and not isinstance(value, bool)
        and DEPTH.fullmatch(key) is not None
    )


def seen(kinds: list[Any]) -> int:
    """How many layers it takes until every kind has been there; numbers of layers are no kinds."""
    return (
        0 if kinds == list(range(len(kinds))) else 1 + max(kinds.index(one) for one in set(kinds))
    )


__all__ = ["small"]
