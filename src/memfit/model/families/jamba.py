"""Jamba: layers of Mamba 1 or of attention, each with a dense feed-forward or with experts. Mamba's
layers go through a sequence token by token, as `transformers` runs them without `mamba-ssm`."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import TRACE, Dims, Row, captured, each, ratio, variants
from memfit.model.label_heads import CLASSIFIES

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 160, 336),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 14),
    "num_key_value_heads": (2, 5, 7),
    "num_experts": (13, 11, 9),
    "num_experts_per_tok": (5, 3, 2),
    "mamba_d_state": (24, 40, 56),
    "mamba_dt_rank": (5, 11, 18),
    "mamba_expand": (2, 3, 2),
}
BASE = {
    "model_type": "jamba",
    "num_hidden_layers": 4,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_conv": 4,
    "tie_word_embeddings": False,
}


def dims(fields: Fields) -> Dims:
    width = fields.count("hidden_size", default=4096)
    if fields.config.get("mamba_dt_rank") in (None, "auto"):
        fields.assume(mamba_dt_rank=-(-width // 16))
    found = each(fields, *SIZES)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    ratio(fields, found, "hidden_size", "num_attention_heads")
    inner = found.pop("mamba_expand") * width
    return {**found, "inner": inner, "split": found["mamba_dt_rank"] + 2 * found["mamba_d_state"]}


def kinds(fields: Fields) -> list[str]:
    """Counted by periods (transformers 5.23 configuration_jamba.py)."""
    attention, experts = (
        places(fields, one, period, first)
        for one, period, first in (("attn", 8, 4), ("expert", 2, 1))
    )
    several = fields.count("num_experts", default=16) > 1
    found = []
    for number in range(fields.layers()):
        name = "attention" if number % attention[0] == attention[1] else "mamba"
        moe = several and number % experts[0] == experts[1]
        if moe and name == "attention":
            message = "no captured graph of `jamba` with experts in a layer of attention"
            fields.blame("expert_layer_offset", message, TRACE)
        found.append(f"{name}_moe" if moe else name)
    return found


def places(fields: Fields, name: str, period: int, first: int) -> tuple[int, int]:
    """A period, and the first layer of it that differs from the others."""
    key = f"{name}_layer_offset"
    every = fields.count(f"{name}_layer_period", default=period)
    start = fields.count(key, default=first, low=0)
    if start >= every:
        message = f"{start} is not less than `{name}_layer_period` {every}"
        fields.blame(key, message, of=(start, every))
    return every, start


captured(
    Row(
        name="jamba",
        label_heads=(CLASSIFIES,),
        dims=dims,
        kinds=kinds,
        examples=variants(BASE, SIZES),
        sizes=((3, 24), (7, 34), (11, 42)),
        derived={"conv_length": ("seq + 3", "1")},
        loops=("seq",),
        packs=False,
        active=lambda fields: (fields.count("num_experts_per_tok"), fields.count("num_experts")),
        silent=(
            "attn_layer_period",
            "attn_layer_offset",
            "expert_layer_period",
            "expert_layer_offset",
            "use_mamba_kernels",
            "num_logits_to_keep",
        ),
    )
)
