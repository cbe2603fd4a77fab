"""mBART: BART with norms before each block and behind the last one."""

from __future__ import annotations

from memfit.model.families._chains import chained
from memfit.model.families.bart import row

chained(row("mbart"))
