"""Data2Vec for text: RoBERTa's architecture, trained otherwise."""

from __future__ import annotations

from memfit.model.families._chains import chained
from memfit.model.families.roberta import like

chained(like("data2vec-text"))
