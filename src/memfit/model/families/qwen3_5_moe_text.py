"""Qwen3.5 with experts, its language model: layers of gated delta rule and of attention."""

from __future__ import annotations

from memfit.model.families._captured import Row, captured, variants
from memfit.model.families.qwen3_next import (
    DERIVED,
    EXPERTS,
    SIZES,
    active,
    base,
    dims,
    kinds,
    sections,
)

ROW = captured(
    Row(
        name="qwen3_5_moe_text",
        dims=lambda fields: sections(fields, dims(fields, *EXPERTS)),
        kinds=kinds,
        examples=variants(base("qwen3_5_moe_text"), {**SIZES, **EXPERTS}),
        active=active,
        sizes=((3, 184), (7, 248), (11, 424)),
        derived=DERIVED,
    )
)
