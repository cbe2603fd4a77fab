"""The model that a case is about, built once."""

from __future__ import annotations

import json
from functools import lru_cache

from memfit.model.model import Model


@lru_cache(maxsize=32)
def built(name: str, stored: str = "", config: str = "", added_tokens: int = 0) -> Model:
    """A model of the catalog, or its checkpoint that is stored quantized; or, with `config`, one
    that is in no catalog. `added_tokens`: its embeddings were made larger by so many."""
    from memfit.model.families import build
    from memfit.model.source import from_catalog

    if config:
        return build(json.loads(config), name=name)
    found = from_catalog(name)
    fields = {
        key: value
        for key, value in found.config.items()
        if key != "quantization_config" or not stored
    }
    if added_tokens:
        fields["vocab_size"] += added_tokens
    if stored:
        fields["quantization_config"] = json.loads(stored)
    return build(fields, name=found.name, origin=found.origin)
