"""mT5: T5 1.1 with a vocabulary of a hundred languages."""

from __future__ import annotations

from memfit.model.families._chains import chained
from memfit.model.families.t5 import row

chained(row("mt5", "mt5", "gated-gelu"))
