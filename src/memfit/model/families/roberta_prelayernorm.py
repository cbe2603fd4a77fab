"""RoBERTa-PreLayerNorm (efficient_mlm): RoBERTa's layers with norms before each block."""

from __future__ import annotations

from memfit.model.families._chains import chained
from memfit.model.families.roberta import like

chained(like("roberta-prelayernorm"))
