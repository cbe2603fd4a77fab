"""The model that a case is about, built once."""

from __future__ import annotations

import json
from functools import lru_cache

from memfit.model.modules import Model


@lru_cache(maxsize=32)
def built(name: str, stored: str = "") -> Model:
    """A model of the catalog, or its checkpoint that is stored quantized."""
    from memfit.model.families import build
    from memfit.model.source import from_catalog

    found = from_catalog(name)
    config = {key: value for key, value in found.config.items() if key != "quantization_config" or not stored}
    if stored:
        config["quantization_config"] = json.loads(stored)
    return build(config, name=found.name, origin=found.origin)
