"""The model that an engine serves: its config, and its structure where memfit has formulas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from memfit.errors import InputError
from memfit.model.families import build
from memfit.model.model import Model
from memfit.model.quantized import settings_in, unquantized
from memfit.model.source import Source
from memfit.serving.base import Subject
from memfit.serving.compressed import is_compressed
from memfit.serving.outline import outline
from memfit.serving.speech import is_speech
from memfit.serving.text_encoders import is_encoder


def with_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with what it says of quantization in one place. Engines look for that in the
    text's config, too (vLLM config/model.py _parse_quant_hf_config, SGLang weight_utils.py
    get_quant_config)."""
    stored = settings_in(config)
    return {**config, "quantization_config": stored} if stored else config


def of_config(config: Mapping[str, Any], name: str) -> Subject:
    """A model that is known by its config alone."""
    return Subject(name=name, config=with_settings(config), model=structure(config))


def subject_from(source: Source) -> Subject:
    """A model as it was read."""
    return Subject(
        name=source.name,
        config=with_settings(source.config),
        source=source,
        model=structure(source.config, source.name, source.origin, source.parameters),
        parameters=source.parameters,
        origin=source.origin,
    )


def structure(
    config: Mapping[str, Any], name: str = "", origin: str = "", parameters: int | None = None
) -> Model | None:
    """The modules of a family that memfit knows, else an outline, at the model's own dtype: what a
    quantization stores is the engine's business. None where nothing is known."""
    try:
        plain = build(unquantized(config), name=name, origin=origin)
        made = dataclasses.replace(plain, config=config)
    except InputError:
        return outline(config, parameters, name, origin)
    # captured graphs say what a layer computes, but not what an engine splits and caches
    if any(layer.captured is not None for layer in made.layers):
        return outline(config, parameters, name, origin)
    return made


def known_model(
    subject: Subject, *, compressed: bool = False, encoders: bool = False, speech: bool = False
) -> Model:
    """The model, where memfit knows its type and its config is sound. `compressed`: also one that
    caches compressed entries; `encoders`: also one that generates nothing; `speech`: also a decoder
    that attends to a sound."""
    if subject.model is None:
        raise reason(subject.config)
    if is_compressed(subject.model) and not compressed:
        message = f"compressed caches of `{subject.model.family}` are known for vLLM alone"
        raise InputError.one(message, where="model", hint="use `--engine vllm`, version 0.25 or so")
    if is_encoder(subject.model) and not encoders:
        message = f"`{subject.model.family}` is an encoder, not supported with this engine yet"
        raise InputError.one(message, where="model", hint="use `--engine vllm`")
    if is_speech(subject.model) and not speech:
        message = f"`{subject.model.family}` has an encoder, not supported with this engine yet"
        raise InputError.one(message, where="model", hint="use `--engine vllm`")
    return subject.model


def reason(config: Mapping[str, Any]) -> InputError:
    """Why there is no model: what is wrong in the config of a known type, or an unknown type."""
    try:
        build(unquantized(config))
    except InputError as bad:
        if any(str(one.where) != "config.model_type" for one in bad.problems):
            return bad
    return InputError.one(
        f"not supported yet: model_type `{str(config.get('model_type'))[:60]}`", where="model"
    )
