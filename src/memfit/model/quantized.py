"""Checkpoints that are stored quantized: `quantization_config` of a config.json, applied to a
family's modules.

What a method stores is a row of `formats`; a method that has none is refused, since its bytes would
be a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from memfit.model.config import Fields
from memfit.model.modules import Layer, Linear, Model, Module, MoE

READ_BY_FAMILY = ("mxfp4",)  # gpt-oss: its family gives the experts their format
BY_FILE = ("gguf",)  # exact sizes come from the file
BY_JOB = ("bitsandbytes",)  # `--quant nf4` and its options say the same


def apply(model: Model, fields: Fields) -> Model:
    """The model with its linear layers in the stored format; problems go to `fields`."""
    settings = fields.mapping("quantization_config")
    if not settings or settings.get("quant_method") in READ_BY_FAMILY + BY_FILE:
        return model
    format = stored_format(settings, fields)
    if not format:
        return model
    skip = kept(settings)
    known: dict[tuple[int, frozenset[str]], Layer] = {}
    layers = []
    for number, layer in enumerate(model.layers):
        names = frozenset(
            name for name in products(layer) if skipped(f"{model.prefix}.{number}.{name}", skip)
        )
        if (id(layer), names) not in known:
            known[id(layer), names] = converted(layer, format, names)
        layers.append(known[id(layer), names])
    return replace(model, layers=tuple(layers))


def method(config: Mapping[str, Any]) -> str:
    """The method that the checkpoint says it is stored by, or nothing; bitsandbytes' is the job's
    business."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping) or not settings:
        return ""
    producer = settings.get("producer")
    name = settings.get("quant_method") or (
        producer.get("name") if isinstance(producer, Mapping) else None
    )
    return "" if name in BY_JOB else str(name or "")


def kept(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Names, or patterns of names, of modules that stay as they are."""
    found: list[str] = []
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"):
        names = settings.get(key)
        found += [str(name) for name in names] if isinstance(names, list) else []
    return tuple(found)


def skipped(path: str, patterns: tuple[str, ...]) -> bool:
    """A pattern means a whole path, a part of it, or what a `*` makes of it."""
    return any(fnmatchcase(path, pattern) or f".{pattern}." in f".{path}." for pattern in patterns)


def products(layer: Layer) -> list[str]:
    """The modules whose weights are stored quantized: linear layers, and mixtures of experts as a
    whole."""
    return [linear.name for linear in layer.linears()] + [
        block.mixer.name for block in layer.blocks if isinstance(block.mixer, MoE)
    ]


def stored_format(settings: Mapping[str, Any], fields: Fields) -> str:
    """The name of the format, or nothing and a problem."""
    name, bits, group = (
        method({"quantization_config": settings}),
        settings.get("bits"),
        settings.get("group_size"),
    )
    if name == "fp8":
        return block_format(settings, fields)
    if name in ("gptq", "awq"):
        if (bits == 4 or (bits == 8 and name == "gptq")) and group in (128, 64, 32):
            return f"{name}-{bits}bit-g{group}"
        if name == "gptq" and bits in (4, 8) and group == -1:
            return f"{name}-{bits}bit-gall"
        fields.blame(
            "quantization_config",
            f"{name} with {bits} bits in groups of {group} is not known",
            "known: 4 bits, gptq also 8, in groups of 128, 64 or 32; gptq also without (-1)",
        )
        return ""
    if name == "modelopt" and str(settings.get("quant_algo")).upper() in ("NVFP4", "FP8"):
        return "nvfp4" if str(settings["quant_algo"]).upper() == "NVFP4" else "float8_e4m3fn"
    told = str(settings.get("quant_method", name))
    where = (
        "`--quant` of the job says how bitsandbytes quantizes"
        if told in BY_JOB
        else "known: fp8, gptq, awq, mxfp4, modelopt"
    )
    fields.blame(
        "quantization_config.quant_method", f"weights stored by `{told[:40]}` are not known", where
    )
    return ""


def block_format(settings: Mapping[str, Any], fields: Fields) -> str:
    block = settings.get("weight_block_size")
    if block in ([128, 128], None):
        return "fp8-block128" if block else "float8_e4m3fn"
    fields.blame(
        "quantization_config.weight_block_size",
        f"fp8 in blocks of {str(block)[:40]} is not known",
        "known: [128, 128], or none",
    )
    return ""


def converted(module: Any, format: str, skip: frozenset[str]) -> Any:
    """The module with every linear layer and expert inside in `format` (none: the model's own),
    except those named in `skip`."""
    if isinstance(module, Linear):
        return module if module.name in skip else replace(module, format=format)
    experts = isinstance(module, MoE) and not (module.format and format) and module.name not in skip
    changes: dict[str, Any] = {"format": format} if experts else {}
    for one in fields_of(module):
        value = getattr(module, one.name)
        if isinstance(value, Module):
            changes[one.name] = converted(value, format, skip)
        elif isinstance(value, tuple) and any(isinstance(item, Module) for item in value):
            changes[one.name] = tuple(
                converted(item, format, skip) if isinstance(item, Module) else item
                for item in value
            )
    return replace(module, **changes)
