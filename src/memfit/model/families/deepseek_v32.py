"""DeepSeek-V3.2: latent attention over the tokens that an indexer picks, and a mixture of experts
chosen by groups."""

from __future__ import annotations

from memfit.model.families._captured import Row, captured, variants
from memfit.model.families.glm_moe_dsa import DERIVED, SILENT, SIZES, active, base, dims, kinds

GROUPED = {**SIZES, "n_routed_experts": (16, 24, 32)}

captured(
    Row(
        name="deepseek_v32",
        dims=dims,
        kinds=kinds,
        examples=variants({**base("deepseek_v32"), "n_group": 8, "topk_group": 4}, GROUPED),
        active=active,
        silent=SILENT,
        derived=DERIVED,
    )
)
