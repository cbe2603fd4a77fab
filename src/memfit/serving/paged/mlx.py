"""MLX on Apple silicon (mlx-lm 0.32): weights, and a cache that grows with the tokens, in the part
of the memory that Metal recommends.

Source: ml-explore/mlx-lm@d78bf58 `mlx_lm/generate.py` wired_limit and prefill_step_size,
`mlx_lm/models/cache.py` KVCache (steps of 256 tokens).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.model.named import by_name
from memfit.model.quantized import MLX
from memfit.serving.base import Device, Subject
from memfit.serving.paged.engine import (
    Held,
    Paged,
    Setup,
    model_option,
    option,
    silent,
    unsupported,
)
from memfit.serving.subject import subject_from
from memfit.serving.weights import rank_bytes

QUANTIZED = re.compile(r"(?P<base>.+?)[-_](?P<bits>[234568])[-_]?bit(?:[-_]\w+)*", re.IGNORECASE)
GROUP = 64  # values that share a scale and a bias of 16 bits (mlx_lm/convert.py q_group_size)


def named(name: str) -> Subject | None:
    """`mlx-community/Qwen3-8B-4bit`: the base model, with all matrices in 4 bits."""
    owner, _, short = name.rpartition("/")
    found = QUANTIZED.fullmatch(short)
    if found is None or owner not in ("", "mlx-community", "lmstudio-community"):
        return None
    source = by_name(found["base"])
    if source is None:
        return None
    config = {key: one for key, one in source.config.items() if key != "quantization_config"}
    config["quantization"] = {"bits": int(found["bits"]), "group_size": GROUP}
    origin = f"{source.origin}, quantized as the name says"
    return subject_from(replace(source, name=name, config=config, origin=origin))


def plain(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with MLX's quantization under one name: mlx-lm writes it under two, the second of
    which (without a method) is other engines' (mlx_lm/utils.py quantize_model)."""
    second = config.get("quantization_config")
    if not isinstance(second, Mapping) or "bits" not in second:
        return config
    if second.get("quant_method", MLX) != MLX:
        return config
    rest = {key: one for key, one in config.items() if key != "quantization_config"}
    return {**rest, "quantization": config.get("quantization") or second}


def weigh(setup: Setup) -> int:
    """All matrices in the bits of the checkpoint, with a scale and a bias for each group; vectors
    as they are."""
    stored = setup.subject.config.get("quantization")
    asked = setup.options.get("q_bits")
    bits = int(asked or (stored or {}).get("bits") or 0)
    group = int((stored or {}).get("group_size") or GROUP)
    if not bits:
        return rank_bytes(setup.model, setup.rank)
    model, total = setup.model, 0.0
    modules = (*model.embed, *model.layers, *model.final)
    weights = [weight for module in modules for weight in module.weights()]
    for weight in (one for one in weights if one.role != "buffer"):
        each = bits / 8 + 4 / group if len(weight.shape) > 1 else setup.width
        total += weight.count * each
    if not model.tied:
        total += model.vocab * model.width * (bits / 8 + 4 / group)
    return int(total) + sum(weight.count for weight in model.towers) * setup.width


def budget(setup: Setup, device: Device, held: Held) -> int:
    """What the recommended working set leaves."""
    return device.total - held.weights - held.activation


ENGINE = Paged(
    name="mlx",
    title="MLX",
    newest="0.32.0",
    options=(
        option("max_kv_size", "size", "tokens of the context [default: the model's own]"),
        option("prefill_step_size", "int", "tokens of a step", default="2048", low=1),
        option("kv_bits", "text", "bits of the cache: 4 or 8", choices=("4", "8")),
        option("q_bits", "int", "quantize the weights, as `mlx_lm.convert` does", low=2, high=8),
        model_option("model"),
        *silent("host", "port", "log_level", "max_tokens", "prompt"),
        *silent("temp", "top_p", "chat_template"),
        *unsupported("adapter_path", "kv_group_size"),
        *silent("trust_remote_code", kind="flag"),
    ),
    starts=(
        ("mlx_lm.server",),
        ("mlx_lm.generate",),
        ("mlx_lm.chat",),
        ("python", "-m", "mlx_lm.server"),
    ),
    model_flags=("--model",),
    length="max_kv_size",
    step="prefill_step_size",
    steps=2048,
    block=256,
    caches="kv_bits",
    unified=True,
    grows=True,
    weigh=weigh,
    names=named,
    config=plain,
    budget=budget,
)
