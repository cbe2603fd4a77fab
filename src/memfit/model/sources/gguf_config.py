"""GGUF metadata in the words of config.json, an architecture a row; what the metadata leaves out is
read off the tensor shapes.

Key names: `gguf.constants.Keys` (gguf 0.19); which converter writes what: llama.cpp's
`convert_hf_to_gguf.py`. An architecture without a row is refused: its sizes would have to be
guessed. A test builds the transformers model of each row and compares parameter counts. Rope
scaling is left out: it needs no memory but a few hundred bytes of frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from memfit.errors import Problem, SourceError, raise_errors
from memfit.lazy_dataclass import dataclass
from memfit.model.sources.files import shown
from memfit.model.sources.gguf import Gguf, Value, Values
from memfit.registry import nearest

LARGEST = 2**40


class Facts:
    """A file's metadata under its architecture's prefix, and the shapes of its tensors; collects
    what is missing or odd."""

    def __init__(self, file: Gguf, architecture: str) -> None:
        self.file, self.prefix = file, f"{architecture}."
        self.shapes = {tensor.name: tensor.shape for tensor in file.tensors}
        # Layers differ (experts, latent attention), so what counts is whether any layer has such a
        # tensor.
        self.parts = {
            name.split(".", 2)[2]: shape
            for name, shape in self.shapes.items()
            if name.startswith("blk.") and name.count(".") > 2
        }
        self.problems: list[Problem] = []

    def value(self, key: str) -> Value | list[Value] | None:
        """A number, a list that differs from layer to layer, or None."""
        value: Value | Values | None = self.file.metadata.get(self.prefix + key)
        if isinstance(value, tuple):
            return value[0] if value and len(set(value)) == 1 else list(value)
        if isinstance(value, float) and not math.isfinite(value):
            self.problems.append(
                Problem(
                    message=f"`{self.prefix}{key}` is {value}, not a number", where=self.file.where
                )
            )
            return None
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 on, for arithmetic; a missing one without default is a problem."""
        value = self.value(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list):
            numbers = [one for one in value if type(one) is int and one > 0]
            value = max(numbers) if numbers else None
        if type(value) is not int or not 1 <= value <= LARGEST:
            said = (
                "is missing"
                if value is None
                else f"is `{str(value)[:40]}`, but must be an integer of at least 1"
            )
            self.problems.append(
                Problem(message=f"`{self.prefix}{key}` {said}", where=self.file.where)
            )
            return 1
        return value

    def has(self, *parts: str) -> bool:
        return any(part in self.parts for part in parts)

    def head(self) -> int:
        """Values per attention head."""
        heads = self.whole("attention.head_count")
        key = self.whole("attention.key_length", 0)
        if key:
            return key
        query = self.parts.get("attn_q.weight")
        return (query[0] if query else self.whole("embedding_length")) // heads

    def rotary(self, share: str) -> dict[str, Any]:
        """The rotated part of a head, where it is not the whole."""
        turned, head = self.whole("rope.dimension_count", self.head()), self.head()
        return {} if turned == head else {share: turned / head}


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """An architecture of llama.cpp in the words of a `model_type` of transformers."""

    model_type: str
    names: Mapping[str, str] = field(
        default_factory=dict
    )  # GGUF key (without prefix): config key; beside COMMON or instead of it
    common: bool = True
    more: Callable[[Facts], dict[str, Any]] = lambda _: {}


COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
_GPT = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_TOKENS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "padding_token_id": "pad_token_id",
}
_LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}


def _llama(facts: Facts) -> dict[str, Any]:
    more: dict[str, Any] = {"head_dim": facts.head()}
    if facts.whole("expert_count", 0):
        # Mixtral has no architecture of its own in llama.cpp: it is a llama with experts.
        return more | {"model_type": "mixtral"} | _renamed(facts, _LOCAL_EXPERTS)
    return more | {
        "attention_bias": facts.has("attn_q.bias", "attn_output.bias"),
        "mlp_bias": facts.has("ffn_up.bias"),
    }


def _heads(facts: Facts) -> dict[str, Any]:
    return {"head_dim": facts.head()}


def _qwen_moe(facts: Facts) -> dict[str, Any]:
    return {
        "head_dim": facts.head(),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss(facts: Facts) -> dict[str, Any]:
    return {
        "head_dim": facts.head(),
        "attention_bias": facts.has("attn_q.bias"),
        "intermediate_size": facts.whole("expert_feed_forward_length"),
    }


def _deepseek(facts: Facts) -> dict[str, Any]:
    """Since the spring of 2025 key_length is that of the latent and `…_mla` that of a head; before,
    key_length was a head's."""
    turned = facts.whole("rope.dimension_count")
    head = facts.whole("attention.key_length_mla", 0) or facts.whole("attention.key_length")
    value = facts.whole("attention.value_length_mla", 0) or facts.whole("attention.value_length")
    if head <= turned:
        facts.problems.append(
            Problem(
                message=f"heads of {head} values cannot have {turned} rotated and others beside",
                where=facts.file.where,
            )
        )
    sigmoid = facts.whole("expert_gating_func", 1) == 2 or facts.has("exp_probs_b.bias")
    more: dict[str, Any] = {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "num_key_value_heads": facts.whole("attention.head_count"),
        "q_lora_rank": facts.whole("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": facts.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": head - turned,
        "v_head_dim": value,
        "moe_layer_freq": 1,
        "first_k_dense_replace": facts.value("leading_dense_block_count") or 0,
        "n_shared_experts": facts.value("expert_shared_count") or None,
    }
    names = {
        "expert_count": "n_routed_experts",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    }
    scales = {
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
    }
    return more | _renamed(facts, names | scales)


def _phi(facts: Facts) -> dict[str, Any]:
    return facts.rotary("partial_rotary_factor")


def _gpt_neox(facts: Facts) -> dict[str, Any]:
    more = {"attention_bias": facts.has("attn_qkv.bias"), "rotary_pct": 1.0} | facts.rotary(
        "rotary_pct"
    )
    return more | _renamed(facts, {"use_parallel_residual": "use_parallel_residual"})


def _tied(_: Facts) -> dict[str, Any]:
    """Tied in every transformers model of this kind; converters write the matrix a second time as
    `output.weight` all the same."""
    return {"tie_word_embeddings": True}


def _bigcode(facts: Facts) -> dict[str, Any]:
    return {"multi_query": facts.whole("attention.head_count_kv", 1) == 1} | _tied(facts)


def _falcon(facts: Facts) -> dict[str, Any]:
    """Grouped heads are the mark of the 40B design; the converter writes no honest head_count_kv
    for the 7B, so the fused matrix tells."""
    queries, heads = facts.whole("attention.head_count"), facts.whole("attention.head_count_kv", 1)
    fused = facts.parts.get("attn_qkv.weight")
    if fused:
        heads = (fused[0] // facts.head() - queries) // 2
    return {
        "num_kv_heads": heads,
        "new_decoder_architecture": facts.has("attn_norm_2.weight") or heads > 1,
        "num_ln_in_parallel_attn": 2 if facts.has("attn_norm_2.weight") else 1,
        "multi_query": heads == 1,
        "parallel_attn": True,
        "bias": facts.has("attn_qkv.bias"),
        "alibi": False,
    } | _tied(facts)


def _stablelm(facts: Facts) -> dict[str, Any]:
    more = {
        "use_qkv_bias": facts.has("attn_q.bias"),
        "use_parallel_residual": not facts.has("ffn_norm.weight"),
    }
    return (
        more
        | {"qk_layernorm": facts.has("attn_q_norm.weight"), "partial_rotary_factor": 1.0}
        | facts.rotary("partial_rotary_factor")
    )


def _biased(facts: Facts) -> dict[str, Any]:
    return {"attention_bias": facts.has("attn_q.bias"), "mlp_bias": facts.has("ffn_up.bias")}


def _starcoder2(facts: Facts) -> dict[str, Any]:
    return {"use_bias": facts.has("attn_q.bias", "ffn_up.bias")}


def _granite_moe(facts: Facts) -> dict[str, Any]:
    shared = facts.value("expert_shared_feed_forward_length")
    return {"model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else {}


def _cohere(facts: Facts) -> dict[str, Any]:
    return {"use_qk_norm": facts.has("attn_q_norm.weight")} | _renamed(
        facts, {"logit_scale": "logit_scale"}
    )


ARCHITECTURES: Mapping[str, Words] = {
    "llama": Words(model_type="llama", more=_llama),
    "qwen2": Words(model_type="qwen2"),
    "qwen2vl": Words(
        model_type="qwen2"
    ),  # the text half; the vision tower is a file of its own (mmproj)
    "qwen2moe": Words(
        model_type="qwen2_moe",
        names=_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    "qwen3": Words(model_type="qwen3", more=_heads),
    "qwen3vl": Words(model_type="qwen3", more=_heads),
    "qwen3moe": Words(model_type="qwen3_moe", names=_EXPERTS, more=_qwen_moe),
    "gemma": Words(model_type="gemma", more=_heads),
    "gemma2": Words(model_type="gemma2", more=_heads),
    "gemma3": Words(model_type="gemma3_text", more=_heads),
    "phi2": Words(model_type="phi", names=_LAYER_NORM, more=_phi),
    "phi3": Words(model_type="phi3", more=_phi),
    "deepseek2": Words(
        model_type="deepseek_v2",
        names={
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        more=_deepseek,
    ),
    "gpt-oss": Words(model_type="gpt_oss", names=_LOCAL_EXPERTS, more=_gpt_oss),
    "gpt2": Words(model_type="gpt2", names=_GPT, common=False, more=_tied),
    "starcoder": Words(model_type="gpt_bigcode", names=_GPT, common=False, more=_bigcode),
    "gptneox": Words(model_type="gpt_neox", names=_LAYER_NORM, more=_gpt_neox),
    "bloom": Words(
        model_type="bloom",
        names={
            "embedding_length": "hidden_size",
            "block_count": "n_layer",
            "attention.head_count": "n_head",
        },
        common=False,
        more=_tied,
    ),
    "falcon": Words(
        model_type="falcon", names={"feed_forward_length": "ffn_hidden_size"}, more=_falcon
    ),
    "starcoder2": Words(
        model_type="starcoder2",
        names={"attention.layer_norm_epsilon": "norm_epsilon"},
        more=_starcoder2,
    ),
    "stablelm": Words(model_type="stablelm", names=_LAYER_NORM, more=_stablelm),
    "olmo": Words(model_type="olmo", names={"attention.clamp_kqv": "clip_qkv"}),
    "olmo2": Words(model_type="olmo2"),
    "olmoe": Words(
        model_type="olmoe",
        names={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    ),
    "granite": Words(model_type="granite", more=_biased),
    "granitemoe": Words(model_type="granitemoe", names=_LOCAL_EXPERTS, more=_granite_moe),
    "command-r": Words(model_type="cohere", names=_LAYER_NORM, more=_cohere),
    "smollm3": Words(model_type="smollm3", more=_biased),
    "seed_oss": Words(model_type="seed_oss", more=_heads),
    "arcee": Words(model_type="arcee", more=_heads),
}
# Files that are no language model by themselves.
_OTHERS = {
    "clip": "it contains a model's vision tower: give the file of the model itself",
    "wavtokenizer-dec": "it contains an audio decoder",
    "diffusion": "it contains an image model",
}


def _renamed(facts: Facts, names: Mapping[str, str]) -> dict[str, Any]:
    """What is there, in other words; a window of 0 means none (the converter of phi-3 writes that
    for phi-4)."""
    found = {name: facts.value(key) for key, name in names.items()}
    return {
        name: value
        for name, value in found.items()
        if value is not None and (name != "sliding_window" or value)
    }


def read_config(file: Gguf) -> dict[str, Any]:
    """The config, or every reason why there is none."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise SourceError.one(
            f"`{file.where}` does not name its `general.architecture`", where="model"
        )
    kind = file.metadata.get("general.type", "model")
    if kind == "adapter":
        raise SourceError.one(
            f"`{file.where}` is an adapter, not a model",
            where="model",
            hint="estimate its base model with `--method lora`",
        )
    words = ARCHITECTURES.get(architecture)
    if words is None:
        close = nearest(architecture, ARCHITECTURES)
        hint = _OTHERS.get(architecture) or "give the original model, its config.json or its folder"
        raise SourceError.one(
            f"the GGUF architecture `{shown(architecture)}` is not supported yet",
            where="model",
            hint=hint
            + (f"; the nearest known: {', '.join(f'`{one}`' for one in close)}" if close else ""),
        )
    facts = Facts(file, architecture)
    if len(facts.shapes.get("token_embd.weight", ())) != 2 or not facts.parts:
        raise SourceError.one(
            f"`{file.where}` contains only a vocabulary or a part of a model", where="model"
        )
    for key in ("block_count", "embedding_length", "attention.head_count"):
        facts.whole(key)
    config: dict[str, Any] = {"model_type": words.model_type}
    config |= _renamed(facts, {**(COMMON if words.common else {}), **words.names})
    # The matrix as stored: converters pad the vocabulary or not, and this is what fills the memory.
    config |= {
        "vocab_size": facts.shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in facts.shapes,
    }
    if not facts.problems:
        config |= words.more(facts)
    raise_errors(_once(facts.problems), SourceError)
    for key, name in _TOKENS.items():
        token = file.metadata.get(f"tokenizer.ggml.{key}")
        if type(token) is int and 0 <= token < config["vocab_size"]:
            config[name] = token
    return config | {"quantization_config": {"quant_method": "gguf"}}


def _once(problems: list[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))
