"""Checkpoints known by name alone: a base model of the catalog, quantized as the name says.

`RedHatAI/Qwen3-14B-FP8-dynamic` is Qwen3-14B with an fp8 scale per output. The hub knows better;
the name is what is left without a network, and the answer says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memfit.model import catalog
from memfit.model.source import Source, from_catalog

COMPRESSED = "compressed-tensors"


def weights(bits: int, kind: str, strategy: str, group: int = 0, **more: Any) -> dict[str, Any]:
    """A `quantization_config` in the form of compressed-tensors, with the head left out."""
    inner = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **more}
    if group:
        inner["group_size"] = group
    return {
        "quant_method": COMPRESSED,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": inner}},
        "ignore": ["lm_head"],
    }


CHANNEL = weights(8, "float", "channel")
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
TENSOR = weights(8, "float", "tensor")
INT8 = weights(8, "int", "channel")
GROUPED = weights(4, "int", "group", 128)
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
# Endings of names and what they mean, by organisation where it matters; the first match holds.
ENDINGS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    (r"", r"[-_.]fp8[-_]?dynamic", CHANNEL),
    (r"", r"[-_.]fp8[-_]?block", weights(8, "float", "block", block_structure=[128, 128])),
    (r"redhatai|neuralmagic|nm-testing|nvidia", r"[-_.]fp8(-kv)?", TENSOR),
    (r"qwen|deepseek-ai|zai-org|unsloth|minimaxai", r"[-_.]fp8", BLOCK),
    (r"", r"[-_.]fp8", CHANNEL),
    (r"", r"[-_.](quantized[-_.])?w8a8([-_]\w+)?", INT8),
    (r"", r"[-_.](quantized[-_.])?(int4[-_])?w4a16", GROUPED),
    (r"", r"[-_.](unsloth-)?bnb-4bit", NF4),
    (r"", r"[-_.]nvfp4", NVFP4),
    (r"cpatonn", r"[-_.]gptq[-_]?4bit", GROUPED),
    (r"cpatonn", r"[-_.]awq[-_]?4bit", weights(4, "int", "group", 32)),
    (r"", r"[-_.]gptq(-int4|-4bit)?", GPTQ),
    (r"", r"[-_.]gptq-int8", {**GPTQ, "bits": 8}),
    (r"", r"[-_.]awq(-int4|-4bit)?", AWQ),
)
TUNED = re.compile(r"[-_](instruct|it|chat|base|pt|hf)(?=$|[-_])", re.IGNORECASE)


def split_name(name: str) -> tuple[str, Mapping[str, Any] | None]:
    """The name of the base model, and the quantization that the name tells."""
    owner, _, short = name.rpartition("/")
    for owners, ending, config in ENDINGS:
        found = re.search(rf"{ending}$", short, re.IGNORECASE)
        if found and (not owners or re.fullmatch(owners, owner, re.IGNORECASE)):
            return short[: found.start()], config
    return short, None


def find_base(short: str) -> str | None:
    """The model of the catalog that `short` means: the same name under any owner, else the same
    model tuned otherwise."""
    wanted = fold(short)
    loose = None
    for one in catalog.names():
        key = fold(one.rpartition("/")[2])
        if key == wanted:
            return one
        if loose is None and TUNED.sub("", key) == TUNED.sub("", wanted):
            loose = one
    return loose


def fold(name: str) -> str:
    """Names without case, separators, and Meta's own first word."""
    return re.sub(r"[_\s]", "-", name.lower()).removeprefix("meta-")


def by_name(name: str) -> Source | None:
    """The base model's config with the quantization of the name; None where the base is unknown."""
    short, quantization = split_name(name)
    base = find_base(short)
    if base is None:
        return None
    source = from_catalog(base)
    config = dict(source.config)
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    return Source(
        name=name,
        origin=f"config of {base} from the bundled catalog"
        + (", quantized as the name says" if quantization is not None else ""),
        config=config,
        parameters=source.parameters,
    )


__all__ = ["by_name", "find_base", "split_name"]
