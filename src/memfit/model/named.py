"""Checkpoints known by name alone: a base model of the catalog, quantized as the name says.

`RedHatAI/Qwen3-14B-FP8-dynamic` is Qwen3-14B with an fp8 scale per output. The hub knows better;
the name is what is left without a network, and the answer says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
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
# Meta's own: feed-forwards alone, without the first and the last layer (the 405B has 126)
FBGEMM = {
    "quant_method": "fbgemm_fp8",
    "modules_to_not_convert": ["*self_attn*", "model.layers.0.*", "model.layers.125.*", "lm_head"],
}
# Ascend's w4a8 keeps experts in 4 bits and everything else in 8
W4A8 = {"quant_method": "w4a8", "ignore": ["lm_head"]}
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_use_double_quant": True,
}
# Unsloth's dynamic 4 bits leave other layers in 16 bits in every model: only the config says which
# (logs of five have 4 to 14 % more weights than without any).
UNTOLD: dict[str, Any] = {}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
# NVIDIA's own, which bring an fp8 cache along (their hf_quant_config.json)
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_quant_algo": "FP8",
    "exclude_modules": ["lm_head"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
SMALL = weights(4, "int", "group", 32)
# Endings of names and what they mean, by organisation where it matters; the first match holds.
ENDINGS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    (r"", r"[-_.]fp8[-_]?dynamic", CHANNEL),
    (r"", r"[-_.]fp8[-_]?block", weights(8, "float", "block", block_structure=[128, 128])),
    (r"meta-llama", r"[-_.]fp8", FBGEMM),
    (r"nvidia", r"[-_.]fp8(-kv)?", MODELOPT),
    (r"nvidia", r"[-_.]nvfp4", {**NVFP4, "kv_cache_quant_algo": "FP8"}),
    (r"redhatai|neuralmagic|nm-testing", r"[-_.]fp8(-kv)?", TENSOR),
    (r"qwen|deepseek-ai|zai-org|unsloth|minimaxai", r"[-_.]fp8", BLOCK),
    (r"", r"[-_.]fp8", CHANNEL),
    (r"", r"[-_.](quantized[-_.])?w8a8([-_]\w+)?", INT8),
    (r"", r"[-_.]w4a8([-_][\w-]+)?", W4A8),
    (r"", r"[-_.](quantized[-_.])?(int4[-_])?w4a16", GROUPED),
    (r"", r"[-_.]unsloth-bnb-4bit", UNTOLD),
    (r"", r"[-_.]bnb-4bit", NF4),
    (r"", r"[-_.]nvfp4", NVFP4),
    # Fitted: 128 meets the logged weights, 32 does not; the nine logs are no evidence (served.py).
    (r"cpatonn", r"[-_.]gptq[-_]?4bit", GROUPED),
    # cpatonn is called cyankiwi since 2026. vLLM names a group of 32 as it loads unseen-0169.
    (r"cpatonn|cyankiwi", r"[-_.]awq[-_]?4bit", SMALL),
    (r"", r"[-_.]gptq(-int4|-4bit)?", GPTQ),
    (r"", r"[-_.]gptq-int8", {**GPTQ, "bits": 8}),
    (r"", r"[-_.]awq(-int4|-4bit)?", AWQ),
)
# Recipes leave linear attention in 16 bits (llm-compressor examples/quantization_w4a4_fp4/
# qwen3_next_example.py, qwen3_5_example.py, quantization_w8a8_fp8/qwen3_next_example.py). One of
# AWQ does not (examples/awq/qwen3_next_example.py); a name does not tell which, so the larger size
# counts. The makers of the models, whose fp8 has blocks, do not either.
LINEAR_ATTENTION = "re:.*linear_attn.*"
# Tools that read the checkpoint through transformers do not load the layers that guess tokens
# (modeling_qwen3_next.py, modeling_qwen3_5_moe.py _keys_to_ignore_on_load_unexpected, 5.23), so
# what is served with them are copies in 16 bits.
GUESSING = "re:^mtp.*"
# The same author quantizes nothing but experts there: loading unseen-0169 and unseen-0185, vLLM
# names the kernel of their experts, and none of linear layers, as it does for each that it takes
# (compressed_tensors_wNa16.py, `Using %s for CompressedTensorsWNA16`, 0.13 to 0.20).
EXPERTS_ALONE = ("re:.*self_attn.*", "re:.*shared_expert.*")
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


@cache
def bases() -> tuple[Mapping[str, Any], ...]:
    """Models that are not in the catalog: `bases.json`, each with where its config is from."""
    path = Path(__file__).with_name("bases.json")
    return tuple(json.loads(path.read_text(encoding="utf-8")))


def extra_base(short: str) -> Source | None:
    """A model of `bases.json` by the last part of its name."""
    for row in bases():
        if fold(str(row["name"]).rpartition("/")[2]) != fold(short):
            continue
        if "same" in row:
            source = from_catalog(str(row["same"]))
            return Source(
                name=str(row["name"]),
                origin=f"config of {row['same']} ({row['source']})",
                config=dict(source.config),
                parameters=source.parameters,
            )
        return Source(
            name=str(row["name"]),
            origin=str(row["source"]),
            config=row["config"],
            parameters=int(row["parameters"]),
        )
    return None


def mistyped(name: str) -> bool:
    """Whether the owner is nearly that of the model that the name means: no copy, but a slip."""
    owner, _, _ = name.rpartition("/")
    base = find_base(split_name(name)[0])
    if not owner or base is None:
        return False
    true = base.rpartition("/")[0].lower()
    likeness = SequenceMatcher(None, owner.lower(), true).ratio()
    return owner.lower() != true and likeness >= catalog.TYPO


def recipe(quantization: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What the name tells, with what recipes leave out in models of this kind."""
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else config
    if "linear_num_value_heads" not in inner or quantization == BLOCK:
        return dict(quantization)
    ignored = [*quantization.get("ignore", ()), LINEAR_ATTENTION, GUESSING]
    if quantization == SMALL and inner.get("num_experts"):
        ignored += EXPERTS_ALONE
    return {**quantization, "ignore": ignored}


def by_name(name: str) -> Source | None:
    """The base model's config with the quantization of the name; None where the base is unknown, or
    the name does not tell."""
    short, quantization = split_name(name)
    if quantization == UNTOLD:
        return None
    source = extra_base(short)
    base = find_base(short) if source is None else source.name
    if base is None:
        return None
    if source is None:
        source = from_catalog(base)
    elif quantization is None:
        return source
    config = dict(source.config)
    if quantization is not None:
        config["quantization_config"] = recipe(quantization, config)
    return Source(
        name=name,
        origin=f"config of {base} from the bundled catalog"
        + (", quantized as the name says" if quantization is not None else ""),
        config=config,
        parameters=source.parameters,
    )


__all__ = ["bases", "by_name", "find_base", "mistyped", "split_name"]
