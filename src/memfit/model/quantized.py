"""Checkpoints that are stored quantized: `quantization_config` of a config.json, applied to a
family's modules.

What a method stores is a row of `formats`; a method that has none is refused, since its bytes would
be a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from fnmatch import translate
from functools import lru_cache
from typing import Any

from memfit.errors import InputError, Problem
from memfit.model.config import Fields
from memfit.model.model import Model
from memfit.model.modules import Layer, Linear, Module, MoE

READ_BY_FAMILY = ("mxfp4",)  # gpt-oss: its family gives the experts their format
BY_FILE = ("gguf",)  # exact sizes come from the file
WILD = re.compile(r"[*?\[]")
BY_PRODUCER = ("modelopt", "compressed-tensors")  # tools that write several formats
MLX = "mlx"
BY_JOB = ("bitsandbytes",)  # `--quant nf4` and its options say the same


def apply(model: Model, fields: Fields) -> Model:
    """The model with its linear layers in the stored format; problems go to `fields`."""
    settings = settings_in(fields.config)
    if settings.get("quant_method") == MLX:
        fields.problems.append(mlx_only())
        return model
    settings = (settings and fields.mapping("quantization_config")) or settings
    if not settings or settings.get("quant_method") in READ_BY_FAMILY + BY_FILE + BY_JOB:
        return model
    format = stored_format(settings, fields)
    if not format:
        return model
    skip = Skip(kept(settings))
    known: dict[tuple[int, frozenset[str]], Layer] = {}
    layers = []
    for number, layer in enumerate(model.layers):
        names = frozenset(
            name for name in products(layer) if f"{model.path(number)}.{name}" in skip
        )
        if (id(layer), names) not in known:
            known[id(layer), names] = converted(layer, format, names)
        layers.append(known[id(layer), names])
    return replace(model, layers=tuple(layers))


def method(config: Mapping[str, Any]) -> str:
    """The method that the checkpoint says it is stored by, or nothing; bitsandbytes' is the job's
    business."""
    settings = settings_in(config)
    if not settings:
        return ""
    producer = settings.get("producer")
    name = settings.get("quant_method") or (
        producer.get("name") if isinstance(producer, Mapping) else None
    )
    return "" if name in BY_JOB else str(name or "")


def bitsandbytes_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a job that loads a checkpoint as bitsandbytes stored it
    (transformers/utils/quantization_config.py BitsAndBytesConfig); none for any other."""
    settings = settings_in(config)
    if settings.get("quant_method") not in BY_JOB:
        return {}
    found: dict[str, Any] = {"quant": "int8"}
    if settings.get("load_in_4bit") or settings.get("_load_in_4bit"):
        compute = str(settings.get("bnb_4bit_compute_dtype") or "float32")
        found = {
            "quant": str(settings.get("bnb_4bit_quant_type") or "fp4"),
            "double_quant": bool(settings.get("bnb_4bit_use_double_quant")),
            "quant_compute": compute.removeprefix("torch."),
        }
    whole = settings.get("llm_int8_skip_modules")
    kept = ",".join(map(str, whole)) if isinstance(whole, list) else str(whole or "")
    return found | ({"quant_skip": kept} if kept else {})


def stored_as(model: Model) -> str:
    """The name of the format in which a checkpoint stores quantized weights (`fp8`, `mxfp4`), or
    nothing."""
    name = method(model.config)
    if name not in BY_PRODUCER:
        return name
    last = model.layers[-1]  # the first ones may stay as they are
    experts = [block.mixer.format for block in last.blocks if isinstance(block.mixer, MoE)]
    formats = [*experts, *(linear.format for linear in last.linears())]
    format = next(filter(None, formats), name)
    return "fp8" if format.startswith("float8") else format.partition("-")[0]


def settings_in(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of quantization: itself, its text part, or modelopt's file beside it."""
    text, beside = config.get("text_config"), config.get("hf_quant_config")
    if isinstance(beside, Mapping) and isinstance(beside.get("quantization"), Mapping):
        beside = {"quant_method": "modelopt", **beside["quantization"]}
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    for found in (mlx_settings(config), config.get("quantization_config"), inner, beside):
        if isinstance(found, Mapping) and found:
            return found
    return {}


def mlx_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """MLX's own, which name no method and stand under two names (mlx_lm/utils.py
    quantize_model)."""
    found = config.get("quantization")
    other = config.get("quantization_config")
    if not isinstance(found, Mapping) or not {"bits", "group_size"} <= found.keys():
        return {}
    if isinstance(other, Mapping) and other.get("quant_method", MLX) != MLX:
        return {}
    return {**found, "quant_method": MLX}


def unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model in its own numbers."""
    left_out = ("quantization_config", *(["quantization"] if mlx_settings(config) else []))
    return {key: value for key, value in config.items() if key not in left_out}


def mlx_only() -> Problem:
    """What to say of weights that MLX alone reads."""
    return Problem(
        message="the weights are in MLX's format, which nothing but MLX loads",
        where="config.quantization",
        hint="`--engine mlx`, or the model that they were made from",
    )


def format_at(path: str, settings: Mapping[str, Any]) -> str | None:
    """The format of the linear layer or the experts at `path`: empty where they stay as they are,
    None where nobody knows it."""
    if path in Skip(kept(settings)) or tail(path) is None:
        return ""
    listed = settings.get("quantized_layers")
    if isinstance(listed, Mapping) and listed:
        return layer_format(tail(path) or "", listed_formats(settings))
    groups = settings.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        weights = [one.get("weights") for one in groups.values() if isinstance(one, Mapping)]
        return weights_format(weights[0], settings) if len(weights) == 1 else None
    fields = Fields({})
    name = stored_format(settings, fields)
    return None if fields.problems else name


def layer_format(path: str, known: Mapping[str, str | None]) -> str | None:
    """By a whole path, or by that of one of the experts inside."""
    return known.get(path, "")


@lru_cache(maxsize=4)
def _listed(names: tuple[tuple[str, str], ...]) -> Mapping[str, str | None]:
    found: dict[str, str | None] = {}
    for name, algorithm in names:
        path = tail(name) or name
        found[path] = ALGORITHMS.get(algorithm.upper())
        head, middle, _ = path.partition(".experts.")
        if middle:
            found[f"{head}.experts"] = found[path]
    return found


def listed_formats(settings: Mapping[str, Any]) -> Mapping[str, str | None]:
    """The formats that modelopt lists, layer by layer."""
    return _listed(
        tuple(
            (str(name), str(one.get("quant_algo") if isinstance(one, Mapping) else one))
            for name, one in settings["quantized_layers"].items()
        )
    )


# modelopt 0.29 quantization/config.py
ALGORITHMS = {
    "NVFP4": "nvfp4",
    "FP8": "float8_e4m3fn",
    "MXFP8": "mxfp8",
    "FP8_PB_WO": "fp8-block128",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
}
_TAIL = re.compile(r"(?:^|\.)layers\.(\d+\..*)$")
# What publishers call the same module.
_SAME = (("block_sparse_moe.", "mlp."), (".ffn.", ".mlp."))


def tail(path: str) -> str | None:
    """A module's path from its layer's number on, which publishers and transformers agree about;
    None outside of the language model's layers."""
    if "vision" in path or "visual" in path or "audio" in path:
        return None
    found = _TAIL.search(path)
    if found is None:
        return None
    name = found[1]
    for theirs, ours in _SAME:
        name = name.replace(theirs, ours)
    return name


def weights_format(weights: Any, settings: Mapping[str, Any]) -> str | None:
    """Of a scheme of compressed-tensors (0.12 quantization/quant_args.py), which modelopt writes,
    too."""
    if not isinstance(weights, Mapping):
        return None
    kind, bits, group = weights.get("type"), weights.get("num_bits"), weights.get("group_size")
    if kind == "float" and bits == 8:
        return "float8_e4m3fn"
    if kind == "float" and bits == 4:
        return {16: "nvfp4", 32: "mxfp4"}.get(group or 0)
    packed = settings.get("format", "pack-quantized") == "pack-quantized"
    if kind == "int" and bits == 4 and weights.get("symmetric") and packed:
        return {32: "int4-g32", 64: "int4-g64", 128: "int4-g128"}.get(group or 0)
    return None


def kept(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Names, or patterns of names, of modules that stay as they are."""
    found: list[str] = []
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"):
        names = settings.get(key)
        found += [str(name) for name in names] if isinstance(names, list) else []
    return tuple(found)


class Skip:
    """Modules that stay as they are, by patterns: a whole path, a part of it, what a `*` makes of
    it, or behind `re:` what a regular expression finds. Plain names are looked up, and patterns
    with wildcards are one expression: some checkpoints list thousands of names. Decoder layers are
    compared whatever the stack is called that holds them."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.expressions = tuple(one for one in patterns if one.startswith("re:"))
        self.literal = {one for one in patterns if WILD.search(one)}.difference(self.expressions)
        self.plain = frozenset(patterns).difference(self.expressions, self.literal)
        self.stacked = frozenset(map(in_stack, self.plain)) - self.plain
        wild = sorted(map(in_stack, self.literal))  # a path may have such characters itself
        self.wild = re.compile("|".join(map(translate, wild))) if wild else None

    def __contains__(self, path: object) -> bool:
        name, stacked = str(path), in_stack(str(path))
        parts, own = name.split("."), stacked.split(".")
        ends = range(1, len(parts) + 1)
        if any(".".join(parts[i:end]) in self.plain for end in ends for i in range(end)):
            return True
        if any(".".join(own[:end]) in self.stacked for end in ends):
            return True
        if self.wild is not None and self.wild.match(stacked):
            return True
        if WILD.search(name) and any(f".{one}." in f".{name}." for one in self.literal):
            return True
        held = STACKS if stacked.startswith("layers.") else ()
        spelled = (name, *(f"{one}{stacked}" for one in held))
        return any(found(one, each) for one in self.expressions for each in spelled)


# What checkpoints, old and new, call the stack of decoder layers: transformers and vLLM rename it.
STACKS = ("model.", "model.language_model.", "language_model.model.", "backbone.")


def in_stack(path: str) -> str:
    """A path, or a pattern, from `layers.` on where it starts with the name of the stack."""
    held = (one for one in STACKS if path.startswith(f"{one}layers."))
    return path[len(next(held, "")) :]


def found(pattern: str, path: str) -> bool:
    """Whether a regular expression means `path`."""
    try:
        return re.match(pattern[3:], path) is not None
    except re.error as bad:
        raise InputError.one(
            f"`{pattern[:60]}` is not a regular expression ({bad})",
            where="config.quantization_config",
        ) from None


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
            f"{name} with {bits} bits and group size {group} is not supported yet",
            ("supported: 4 bits (gptq also 8) with group size 128, 64 or 32 (gptq also -1)"),
        )
        return ""
    if name == "compressed-tensors" and (found := format_at("layers.0.mlp", settings)):
        return found
    if name == "modelopt" and str(settings.get("quant_algo")).upper() in ("NVFP4", "FP8"):
        return "nvfp4" if str(settings["quant_algo"]).upper() == "NVFP4" else "float8_e4m3fn"
    told = str(settings.get("quant_method", name))
    fields.blame(
        "quantization_config.quant_method",
        f"weights quantized by `{told[:40]}` are not supported yet",
        "supported: bitsandbytes, fp8, gptq, awq, mxfp4, modelopt, compressed-tensors",
    )
    return ""


def block_format(settings: Mapping[str, Any], fields: Fields) -> str:
    block = settings.get("weight_block_size")
    if block in ([128, 128], None):
        return "fp8-block128" if block else "float8_e4m3fn"
    fields.blame(
        "quantization_config.weight_block_size",
        f"fp8 with blocks of {str(block)[:40]} is not supported yet",
        "supported: [128, 128], or none",
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
