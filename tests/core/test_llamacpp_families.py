"""llama.cpp's less usual architectures: their tensors, caches and refusals. tests/engines compares
their graphs with llama.cpp itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.engines.llamacpp_models import small

from memfit.errors import SourceError
from memfit.model import catalog
from memfit.serving.llamacpp.convert import converted
from memfit.serving.llamacpp.loading import check
from memfit.serving.llamacpp.memory import Buffers, buffers
from memfit.serving.llamacpp.model import GgufModel
from memfit.serving.llamacpp.placement import BACKENDS, HOST, Machine
from memfit.serving.llamacpp.settings import Settings

CPU = Machine(backend=BACKENDS["cpu"])
TOKEN = 2  # bytes of a value of the cache


def config_of(name: str) -> dict[str, Any]:
    found = catalog.find(name)
    assert found is not None
    return dict(catalog.entry(found).config())


def named(name: str, quantization: str = "F16") -> GgufModel:
    return converted(config_of(name), name, quantization)


def held(model: GgufModel, **settings: Any) -> Buffers:
    return buffers(model, Settings(**{"context": 1024, **settings}), CPU)


# ------------------------------------------------------------------ searched layers


def test_searched_layers_have_the_published_parameters() -> None:
    """Safetensors of Llama-3.3-Nemotron-Super-49B hold 49,867,145,216; a GGUF file adds 64 factors
    of rotation. 49 of the 80 layers have attention."""
    model = named("nvidia/Llama-3_3-Nemotron-Super-49B-v1")
    assert model.parameters == 49_867_145_216 + 64
    assert held(model).kv[HOST] == 49 * 1024 * 2 * 8 * 128 * TOKEN


def test_without_flash_attention_all_layers_keep_the_values_of_the_widest() -> None:
    """Two layers have attention, with 2 and 1 heads of 64 values; all six keep 128 values then."""
    model = small("nemotron-nas")
    assert held(model).kv[HOST] == 1024 * (128 + 64) * 2 * TOKEN
    assert held(model, flash=False).kv[HOST] == 1024 * (128 + 64 + 6 * 128) * TOKEN


def test_a_layer_may_be_empty_only_where_the_metadata_say_so() -> None:
    model = small("nemotron-nas")
    assert not model.of_layer(3)
    check(model, "file")
    inner = model.facts["feed_forward_length"]
    assert isinstance(inner, tuple)
    facts = {**model.facts, "feed_forward_length": (*inner[:3], 512, *inner[4:])}
    with pytest.raises(SourceError, match=r"1 of them have no tensors \(the first: 3\)"):
        check(replace(model, facts=facts), "file")


def test_searched_layers_need_an_entry_each() -> None:
    config = config_of("nvidia/Llama-3_3-Nemotron-Super-49B-v1")
    config["block_configs"] = config["block_configs"][1:]
    with pytest.raises(SourceError, match="an entry for each of 80 layers"):
        converted(config, "cut", "F16")
