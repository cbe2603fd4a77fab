"""UltraVBERT: Ultrabert's layers beside a tower that images pass through."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import ultrabert  # noqa: F401 - its rows
from memfit.model.families._chains import chained
from memfit.model.families.modernbert import choose
from memfit.model.families.modernvbert import TEXT, connected, seeing
from memfit.model.modules import Weight


def tower(fields: Fields) -> tuple[Weight, ...]:
    """What images pass through (transformers 5.23 modeling_ultravbert.py UltraVBertModel): tokens
    made of patches go through a norm of their own."""
    text = fields.section(TEXT).count("hidden_size")
    scale = Weight(name="model.connector.norm.weight", shape=(text,), role="norm")
    return (*connected(fields, pools=False), scale)


chained(
    seeing("ultravbert", "ultrabert", tower),
    seeing("ultravbert-mean", "ultrabert-mean", tower),
    choose=choose,
)
