"""Qwen3.5 and 3.6 with experts, with their vision tower."""

from __future__ import annotations

from memfit.model.families._captured import captured
from memfit.model.families._composite import text_of
from memfit.model.families.qwen3_5 import with_tower
from memfit.model.families.qwen3_5_moe_text import ROW

captured(with_tower(ROW, "qwen3_5_moe"), alone=text_of)
