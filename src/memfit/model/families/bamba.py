"""Bamba: layers of Mamba 2 and of attention, each with a dense feed-forward."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants
from memfit.model.families._mamba_sizes import ATTENTION, DERIVED, MAMBA, mamba

DENSE = {"intermediate_size": (200, 312, 184)}
BASE = {
    "model_type": "bamba",
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def dims(fields: Fields) -> Dims:
    found = each(fields, *ATTENTION, *MAMBA, *DENSE)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    ratio(fields, found, "hidden_size", "num_attention_heads")
    return mamba(fields, found)


def kinds(fields: Fields) -> list[str]:
    places = fields.integers("attn_layer_indices")
    return ["attention" if number in places else "mamba" for number in range(fields.layers())]


captured(
    Row(
        name="bamba",
        dims=dims,
        kinds=kinds,
        examples=variants(BASE, {**ATTENTION, **MAMBA, **DENSE}),
        derived=DERIVED,
    )
)
