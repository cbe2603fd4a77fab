"""Hunyuan-A13B: norms of each head's queries and keys, and a mixture of experts beside one that
runs for every token."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants
from memfit.model.families.jais2 import BASE, SIZES, defaults
from memfit.model.label_heads import CLASSIFIES

EXPERTS = {"num_experts": (13, 11, 9), "moe_topk": (5, 3, 2)}


def dims(fields: Fields) -> Dims:
    """`moe_topk` may be a list with an entry a layer, all alike."""
    defaults(fields)
    given = fields.config.get("moe_topk")
    if isinstance(given, list) and given and all(one == given[0] for one in given):
        fields.config = {**fields.config, "moe_topk": given[0]}
    found = each(fields, *SIZES, *EXPERTS)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    return found


captured(
    Row(
        name="hunyuan_v1_moe",
        label_heads=(CLASSIFIES,),
        dims=dims,
        kinds=lambda fields: ["layer"] * fields.layers(),
        examples=variants({"model_type": "hunyuan_v1_moe", **BASE}, {**SIZES, **EXPERTS}),
        active=lambda fields: (fields.count("moe_topk"), fields.count("num_experts")),
        absent=("use_cla",),  # keys and values that layers share, in the code of the checkpoint
    )
)
