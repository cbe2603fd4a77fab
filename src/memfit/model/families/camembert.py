"""CamemBERT: RoBERTa for French."""

from __future__ import annotations

from memfit.model.families._chains import chained
from memfit.model.families.roberta import like

chained(like("camembert"))
