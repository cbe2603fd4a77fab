"""The language model of Gemma 4 12B, which has no tower: that of Gemma 4 without experts, without
embeddings of each layer and without shared keys."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._captured import TRACE
from memfit.model.families.gemma4_text import TEXT, text_model
from memfit.model.model import Model

ROWS = (TEXT[0], TEXT[4])  # as many keys as a config says, and one
WINDOW = 1024  # the class's default (transformers 5.23 configuration_gemma4_unified.py)
# Fields that this class does not read
UNREAD = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 1}
UNREAD |= {"enable_moe_block": False}


EXAMPLES = tuple(
    {key: value for key, value in one.items() if key not in UNREAD}
    | {"model_type": "gemma4_unified_text"}
    for row in ROWS
    for one in row.examples
)


@family("gemma4_unified_text", examples=EXAMPLES, graphs=True)
def build(fields: Fields) -> Model:
    if not fields.config.keys() - {"model_type"}:
        fields.config = {}  # no config of a model, whatever the class puts in its place
    else:
        fields.assume(sliding_window=WINDOW)
        fields.config = {**fields.config, **UNREAD}
    if fields.config.get("num_kv_shared_layers"):
        fields.blame("num_kv_shared_layers", "no captured graph with layers that share keys", TRACE)
    row = ROWS[fields.config.get("num_global_key_value_heads") == 1]
    return replace(text_model(row, fields), family="gemma4_unified_text")
