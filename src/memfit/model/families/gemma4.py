"""Gemma 4 with its towers: layers that see a window, and layers that see all with heads of another
size. In 31B, and 26B with experts, these have keys that are their values, too. In E2B and E4B every
layer also reads an embedding of its own, and the last layers reuse keys and values of earlier
ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.model.config import Fields
from memfit.model.families._captured import TRACE, Dims, Row, captured, each, variants
from memfit.model.families._gemma4_towers import audio_tower, gemma4_tower
from memfit.model.modules import Weight

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 136, 232),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (12, 20, 28),
    "num_key_value_heads": (6, 5, 14),
    "head_dim": (40, 88, 56),
    "global_head_dim": (272, 328, 296),
    "num_global_key_value_heads": (3, 10, 4),
}
EXPERTS = {
    "num_experts": (13, 11, 9),
    "top_k_experts": (5, 3, 2),
    "moe_intermediate_size": (64, 152, 120),
}
# Of the models whose layers share keys and values
SHARED = {key: sizes for key, sizes in SIZES.items() if key != "num_global_key_value_heads"} | {
    "num_hidden_layers": (10, 12, 18),
    "hidden_size_per_layer_input": (48, 72, 40),
    "vocab_size_per_layer_input": (500, 572, 660),
}
DEPTHS = ((6, True), (8, False), (12, True))  # layers that do not share, wide feed-forwards behind
TEXT = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 24,
}
AUDIO = {
    "model_type": "gemma4_audio",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "conv_kernel_size": 3,
    "output_proj_dims": 24,
}
# Class defaults (transformers 5.23 configuration_gemma4.py)
DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": False,
}
# Keys and values of larger heads are repeated (transformers 5.23 integrations/sdpa_attention.py
# use_gqa_in_sdpa).
GROUPED = 256
PER_LAYER = "hidden_size_per_layer_input"
SILENT = (
    "final_logit_softcapping",
    "sliding_window",
    "use_bidirectional_attention",
    "vocab_size_per_layer_input",
)


def dims(fields: Fields, *more: str) -> Dims:
    """Layers that see all have heads of their own (`per_layer_config`)."""
    fields.assume(**DEFAULTS)
    fields.assume(num_global_key_value_heads=fields.config["num_key_value_heads"])
    fields.count("vocab_size_per_layer_input", low=0)
    found = each(fields, *SIZES, *more)
    for key in ("num_key_value_heads", "num_global_key_value_heads"):
        count = groups(fields, found, key)
        if found[key] > 1:
            found[f"{key}_groups"] = count
    checked(fields, found)
    return found


def groups(fields: Fields, found: Dims, key: str) -> int:
    heads = found["num_attention_heads"]
    fields.divides(found[key], heads, key, "`num_attention_heads`")
    return heads // found[key]


def checked(fields: Fields, found: Dims) -> None:
    if found["global_head_dim"] <= GROUPED or found["head_dim"] > GROUPED:
        message = "no captured graph of `gemma4` with heads of these sizes"
        fields.blame("global_head_dim", message, TRACE)
    if fields.config.get("use_bidirectional_attention") not in (None, "vision"):
        message = "no captured graph of `gemma4` with this `use_bidirectional_attention`"
        fields.blame("use_bidirectional_attention", message, TRACE)


def shared_dims(fields: Fields) -> Dims:
    """The layers that read keys of others may have wider feed-forwards."""
    fields.assume(**DEFAULTS)
    found = each(fields, *SHARED)
    count = groups(fields, found, "num_key_value_heads")
    if found["num_key_value_heads"] > 1:
        found["num_key_value_heads_groups"] = count
    wide = fields.flag("use_double_wide_mlp", default=False)
    found["shared_intermediate_size"] = found["intermediate_size"] * (1 + wide)
    checked(fields, found)
    return found


def kinds(fields: Fields) -> list[str]:
    """The last layer of each type keeps its keys and values until the model returns."""
    found = types(fields)
    for number in lasts(found):
        found[number] += "_kept"
    return found


def types(fields: Fields) -> list[str]:
    """What each layer sees; the last one always sees all."""
    count = fields.layers()
    usual = ["full" if number % 6 == 5 else "sliding" for number in range(count)]
    listed = fields.listing("layer_types", count, [f"{one}_attention" for one in usual])
    return [*(str(one).removesuffix("_attention") for one in listed[:-1]), "full"]


def lasts(found: list[str]) -> list[int]:
    """Where the last layer of each kind is."""
    return [len(found) - 1 - found[::-1].index(kind) for kind in dict.fromkeys(found)]


def shared_kinds(fields: Fields) -> list[str]:
    """Of the layers that do not share, the last one of each type keeps its keys and values for
    others. The very last one cuts what layers behind it read, and the last of all hands on less."""
    found = types(fields)
    own = len(found) - fields.count("num_kv_shared_layers")
    if own < 1:
        fields.blame("num_kv_shared_layers", f"must be less than {len(found)} layers")
        return found
    begin, end = found[:own], [f"{one}_sharing" for one in found[own:]]
    for number in lasts(begin):
        begin[number] += "_kept"
    begin[-1] += "_cut"
    return [*begin, *end[:-1], f"{end[-1]}_last"] if end else begin


def tower(fields: Fields) -> tuple[Weight, ...]:
    width = fields.section("text_config").count("hidden_size", default=DEFAULTS["hidden_size"])
    found: tuple[Weight, ...] = ()
    for key, build in (("vision_config", gemma4_tower), ("audio_config", audio_tower)):
        if fields.config.get(key) is not None:
            found += build(fields.section(key), width)
    return found


def active(fields: Fields) -> tuple[int, int]:
    return fields.count("top_k_experts"), fields.count("num_experts")


TOWERS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")


def row(
    name: str, examples: Sequence[Mapping[str, Any]], audio: Mapping[str, Any] | None, **how: Any
) -> Row:
    whole = {"model_type": "gemma4", "vision_config": VISION, "audio_config": audio}
    return Row(
        name=name,
        text="text_config",
        examples=tuple({**whole, "text_config": one} for one in examples),
        tied=True,
        softcap="final_logit_softcapping",
        window="sliding_window",
        tower=tower,
        heads=("causal-lm", "image-text"),  # the same class
        last=("model.embed_vision.embedding_projection", "model.embed_audio.embedding_projection"),
        idle=tuple(f"model.{one}." for one in TOWERS),
        **how,
    )


def large(name: str, more: Mapping[str, tuple[int, ...]], **other: tuple[int, ...]) -> Row:
    text = {**TEXT, "enable_moe_block": bool(more)}
    return row(
        name,
        variants(text, {**SIZES, **more, **other}),
        None,
        dims=lambda fields: dims(fields, *more),
        kinds=kinds,
        active=active if more else None,
        silent=SILENT if more else (*SILENT, *EXPERTS),
    )


def small(name: str, heads: tuple[int, ...]) -> Row:
    """With so many keys and values, which torch lays out otherwise where there is one."""
    sizes = {**SHARED, "num_key_value_heads": heads}
    others = [
        {
            "layer_types": ["sliding_attention", "full_attention"] * (count // 2),
            "num_kv_shared_layers": count - own,
            "use_double_wide_mlp": wide,
        }
        for count, (own, wide) in zip(sizes["num_hidden_layers"], DEPTHS, strict=True)
    ]
    text = {**TEXT, "attention_k_eq_v": False, "enable_moe_block": False}
    return row(
        name,
        variants(text, sizes, *others),
        AUDIO,
        dims=shared_dims,
        kinds=shared_kinds,
        silent=(*SILENT, *EXPERTS, "num_global_key_value_heads", "num_kv_shared_layers"),
    )


def choose(fields: Fields) -> int:
    """Small models share keys and values, and have embeddings of each layer; sizes that are none
    are checked by the large ones."""
    text = {**DEFAULTS, **fields.mapping("text_config")}
    sizes = (text.get("num_kv_shared_layers"), fields.mapping("text_config").get(PER_LAYER))
    if any(type(size) is int and size > 0 for size in sizes):
        return 3 if text["num_key_value_heads"] == 1 else 2
    if text.get("enable_moe_block"):
        return 1
    return 4 if text.get("num_global_key_value_heads") == 1 else 0


ROWS = (
    large("gemma4", {}),
    large("gemma4-moe", EXPERTS),
    small("gemma4-small", SIZES["num_key_value_heads"]),
    small("gemma4-small-one", (1, 1, 1)),
    large("gemma4-one", {}, num_global_key_value_heads=(1, 1, 1)),
)
captured(*ROWS, choose=choose)
