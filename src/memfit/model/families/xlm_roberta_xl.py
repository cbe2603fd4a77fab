"""XLM-RoBERTa XL: RoBERTa's layers with norms before each block."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.families._chains import chained
from memfit.model.families.roberta import like

DEFAULTS = {"type_vocab_size": 1, "max_position_embeddings": 514}
chained(replace(like("xlm-roberta-xl"), defaults=DEFAULTS))
