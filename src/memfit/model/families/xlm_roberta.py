"""XLM-RoBERTa: RoBERTa with a vocabulary of a hundred languages."""

from __future__ import annotations

from memfit.model.families._chains import chained
from memfit.model.families.roberta import like

chained(like("xlm-roberta"))
