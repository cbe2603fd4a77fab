"""Model types whose code ships with their checkpoints, and that have the matrices of a known type:
which one, and what their configs call its fields.

The parameters are equal, one matrix that is three in one (`W_pack`, `wqkv`) counted as three. The
code itself is never run; what it keeps for backward is taken to be what the known type's code
keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from memfit.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Equivalent:
    """`like`: the known type. `renames`: their field to ours. `sets`: fields that their code has no
    choice about. `cite`: where the description is from."""

    like: str
    cite: str
    renames: Mapping[str, str] = field(default_factory=dict)
    sets: Mapping[str, Any] = field(default_factory=dict)


EQUIVALENTS: dict[str, Equivalent] = {
    "baichuan": Equivalent(
        like="llama",
        renames={"model_max_length": "max_position_embeddings"},
        cite="Baichuan 2 (arXiv 2309.10305), 7B: Llama with queries, keys and values in W_pack",
    ),
    "deepseek": Equivalent(
        like="glm4_moe",
        sets={
            "use_qk_norm": False,
            "partial_rotary_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        cite="DeepSeekMoE (arXiv 2401.06066): Llama's attention, shared and routed experts",
    ),
    "exaone": Equivalent(
        like="llama",
        renames={
            "num_layers": "num_hidden_layers",
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        cite="EXAONE 3.0 and 3.5 (arXiv 2408.03541, 2412.04862): Llama under other names",
    ),
    "grok-1": Equivalent(like="grok_1", cite="xai-org/grok-1 model.py"),
    "internlm2": Equivalent(
        like="llama",
        renames={"bias": "attention_bias"},
        cite="InternLM2 (arXiv 2403.17297): Llama with queries, keys and values in wqkv",
    ),
    "kimi_k2": Equivalent(
        like="deepseek_v3",
        cite="Kimi K2's config.json names DeepseekV3ForCausalLM",
    ),
    "mimo": Equivalent(
        like="qwen2",
        cite="MiMo (arXiv 2505.07608): Qwen2 with layers that predict further tokens, not counted",
    ),
    "minicpm": Equivalent(like="minicpm", cite="MiniCPM (arXiv 2404.06395), modeling_minicpm.py"),
    "minimax_m3": Equivalent(
        like="minimax_m3_vl_text",
        cite="MiniMax-M3's text model, which transformers has inside of minimax_m3_vl",
    ),
    "new": Equivalent(
        like="gte",
        cite="Alibaba-NLP/new-impl, which transformers has as GTE (vLLM 0.24.0 models/"
        "bert_with_rope.py GteNewModel)",
    ),
    "nemotron-nas": Equivalent(
        like="nemotron_nas", cite="Puzzle (arXiv 2411.19146); block_configs of the config.json"
    ),
}


def equivalent(config: Mapping[str, Any]) -> Equivalent | None:
    """The row of a config's model type. Baichuan's 13B is none: it has ALiBi, and its code makes a
    mask for every head."""
    kind = config.get("model_type")
    row = EQUIVALENTS.get(kind) if isinstance(kind, str) else None
    if kind == "baichuan" and config.get("hidden_size") != 4096:
        return None
    return row


def converted(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config in the words of the known type; others as they are."""
    row = equivalent(config)
    if row is None:
        return config
    values = {key: value for key, value in config.items() if key not in ("auto_map",)}
    for theirs, ours in row.renames.items():
        if theirs in values and ours not in values:
            values[ours] = values.pop(theirs)
    return {**values, **row.sets, "model_type": row.like}


def remarks(config: Mapping[str, Any]) -> Iterator[Problem]:
    """That an answer rests on a description, not on the model's code."""
    row = equivalent(config)
    if row is not None:
        alias = row.like == str(config["model_type"]).replace("-", "_")
        same = "" if alias else f": estimated as `{row.like}`, which has the same matrices"
        yield Problem(
            message=f"the code of `{config['model_type']}` ships with its checkpoints and is "
            f"not run{same}",
            where="config.model_type",
            hint=row.cite,
            level="note",
        )


__all__ = ["EQUIVALENTS", "Equivalent", "converted", "equivalent", "remarks"]
