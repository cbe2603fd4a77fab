"""Every family against the model that transformers itself builds, on the meta device, from each
example config.

A family is tested from the moment its file exists: names, shapes, dtypes and buffers must agree
exactly, and so must what the modules of transformers say of windows, dropouts, experts and
attention kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest

from memfit.formats import FORMATS
from memfit.model.config import ACTIVATIONS
from memfit.model.families import build, families
from memfit.model.model import Model
from memfit.model.modules import Attention, Latent, Layer, MoE

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IMAGE_TEXT = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
# Encoders have heads of their own: tests/torch/test_encoders.py.
FAMILIES = {one.name: one for one in families().values() if not one.brought and not one.heads}
CASES = [
    pytest.param(name, index, id=f"{name}-{index}")
    for name, one in FAMILIES.items()
    for index in range(len(one.examples))
]
# Those whose modules are written out; captured graphs have operations instead.
WRITTEN = [case for case in CASES if not FAMILIES[case.values[0]].graphs]  # type: ignore[index]


def config_of(name: str, index: int) -> dict[str, Any]:
    """The example, in bfloat16: only there does it show which weights stay in float32."""
    return {**FAMILIES[name].examples[index], "dtype": "bfloat16"}


@cache
def theirs(name: str, index: int) -> Any:
    config = transformers.AutoConfig.for_model(**config_of(name, index))
    with torch.device("meta"):
        seeing = config.model_type in IMAGE_TEXT
        autos = ("ImageTextToText",) if seeing else ("CausalLM", "Seq2SeqLM", "SpeechSeq2Seq")
        found = (getattr(transformers, f"AutoModelFor{one}") for one in autos)
        return next(one for one in found if type(config) in one._model_mapping).from_config(config)


@cache
def ours(name: str, index: int) -> Model:
    return build(config_of(name, index))


def kept_in_fp32(model: Any, name: str) -> bool:
    """What `from_pretrained` casts up as it loads (`from_config` does not); the patterns are
    globs."""
    plan = model._get_dtype_plan(torch.bfloat16)
    return any(re.search(re.escape(pattern).replace(r"\*", ".*"), name) for pattern in plan)


def listed(
    model: Any, tensors: Iterator[tuple[str, Any]]
) -> dict[str, tuple[tuple[int, ...], str]]:
    def dtype(name: str, tensor: Any) -> str:
        return (
            "float32"
            if tensor.is_floating_point() and kept_in_fp32(model, name)
            else str(tensor.dtype).removeprefix("torch.")
        )

    return {name: (tuple(tensor.shape), dtype(name, tensor)) for name, tensor in tensors}


@pytest.mark.parametrize(("name", "index"), CASES)
def test_parameters(name: str, index: int) -> None:
    model = ours(name, index)
    found = [
        (weight.name, (weight.shape, weight.format or model.dtype)) for weight in model.weights()
    ]
    assert len(found) == len(dict(found)), "a parameter is named twice"
    assert dict(found) == listed(theirs(name, index), theirs(name, index).named_parameters())
    assert model.parameters == sum(
        parameter.numel() for parameter in theirs(name, index).parameters()
    )


@pytest.mark.parametrize(("name", "index"), CASES)
def test_buffers(name: str, index: int) -> None:
    model = ours(name, index)
    found = {
        weight.name: (weight.shape, weight.format or model.dtype)
        for weight in model.tensors()
        if weight.role == "buffer"
    }
    assert found == listed(theirs(name, index), theirs(name, index).named_buffers())


@pytest.mark.parametrize(("name", "index"), WRITTEN)
def test_equal_layers_are_one_value(name: str, index: int) -> None:
    layers = ours(name, index).layers
    assert len({id(layer) for layer in layers}) == len(set(layers))


def their_layers(their: Any, model: Model) -> list[Any]:
    """Those that text passes through."""
    return [their.get_submodule(model.path(number)) for number in range(len(model.layers))]


def mixers(layer: Layer) -> tuple[Attention | Latent | None, MoE | None]:
    held = [block.mixer for block in layer.blocks]
    attention = next((one for one in held if isinstance(one, (Attention, Latent))), None)
    return attention, next((one for one in held if isinstance(one, MoE)), None)


@pytest.mark.parametrize(("name", "index"), WRITTEN)
def test_windows_and_dropouts(name: str, index: int) -> None:
    """A layer's window is an attribute of its attention where the config lists layer types, or one
    of the config for all; the dropout of the probabilities is an attribute."""
    model, their = ours(name, index), theirs(name, index)
    text = their.config.get_text_config()
    types = getattr(text, "layer_types", None)
    for place, (mine, other) in enumerate(
        zip(model.layers, their_layers(their, model), strict=True)
    ):
        attention, code = mixers(mine)[0], getattr(other, "self_attn", None)
        if attention is None or code is None or not hasattr(code, "attention_dropout"):
            continue
        assert attention.dropout == getattr(code.attention_dropout, "p", code.attention_dropout)
        slides = types is None or types[place] == "sliding_attention"
        window = getattr(code if types else text, "sliding_window", None) if slides else None
        assert (attention.window if isinstance(attention, Attention) else 0) == (window or 0)


@pytest.mark.parametrize(("name", "index"), WRITTEN)
def test_experts(name: str, index: int) -> None:
    model = ours(name, index)
    for mine, other in zip(model.layers, their_layers(theirs(name, index), model), strict=True):
        moe = mixers(mine)[1]
        active = {module.top_k for module in other.modules() if hasattr(module, "top_k")}
        assert active == ({moe.active} if moe else set())


@pytest.mark.parametrize(("name", "index"), WRITTEN)
def test_attention_kernels(name: str, index: int) -> None:
    their = theirs(name, index)
    for layer in set(ours(name, index).layers):
        attention = mixers(layer)[0]
        assert attention is not None
        assert ("sdpa" in attention.kernels) == their._supports_sdpa
        assert ("flash" in attention.kernels) == their._supports_flash_attn


def test_formats_are_known() -> None:
    for name, index in (case.values for case in CASES):
        for weight in ours(str(name), int(str(index))).tensors():
            assert not weight.format or weight.format in FORMATS


def test_activations() -> None:
    """All that transformers knows, but the two that bring weights of their own."""
    from transformers.activations import ACT2FN

    assert set(ACT2FN) - {"prelu", "xielu"} == ACTIVATIONS


def test_examples_name_their_family() -> None:
    for one in FAMILIES.values():
        named: set[Mapping[str, Any] | str] = {example["model_type"] for example in one.examples}
        assert named == set(one.model_types), "an example of each model_type, and of nothing else"
