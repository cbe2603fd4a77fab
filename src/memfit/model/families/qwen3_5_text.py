"""Qwen3.5, its language model: layers of gated delta rule and of attention, dense."""

from __future__ import annotations

from memfit.model.families._captured import Row, captured, variants
from memfit.model.families.qwen3_next import DERIVED, SIZES, base, dims, kinds, sections
from memfit.model.label_heads import CLASSIFIES

DENSE = {"intermediate_size": (200, 312, 184)}

ROW = captured(
    Row(
        name="qwen3_5_text",
        label_heads=(CLASSIFIES,),
        dims=lambda fields: sections(fields, dims(fields, *DENSE)),
        kinds=kinds,
        examples=variants(base("qwen3_5_text"), {**SIZES, **DENSE}),
        sizes=((3, 184), (7, 248), (11, 424)),
        derived=DERIVED,
    )
)
