"""What a token takes in a paged cache: the bytes of a value, and the values of all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.errors import Problem
from memfit.model.model import Model
from memfit.model.modules import Attention, Latent
from memfit.model.quantized import method, settings_in
from memfit.serving.parts import Indexer, Picking, Recurrent, pair
from memfit.serving.weights import Rank, kv_heads, layers_of

EIGHTH, FOURTH = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fn", "int8", "8"), ("int4", "4")


def cache_width(
    config: Mapping[str, Any], named: str, width: int, problems: list[Problem]
) -> float:
    """Bytes of a cached value: as the option says, else as a ModelOpt checkpoint says."""
    kind = checkpoint_cache(config) if named == "auto" else named
    if kind in FOURTH:
        return 0.5
    if kind in EIGHTH:
        return 1.0
    if named == "auto" and kind:
        problems.append(
            Problem(
                message=f"not supported yet: a cache in `{kind[:20]}`, as the checkpoint says",
                where="config.quantization_config",
                hint="name the cache's numbers with the engine's option",
            )
        )
    return float(width)


def checkpoint_cache(config: Mapping[str, Any]) -> str:
    """The numbers of the cache that a ModelOpt checkpoint names: `kv_cache_quant_algo` of
    hf_quant_config.json, or `kv_cache_scheme` of config.json (modelopt 0.29
    torch/export/convert_hf_config.py); empty for those of the model."""
    if not method(config).startswith("modelopt"):
        return ""
    settings = settings_in(config)
    inner = settings.get("quantization")
    named = {**settings, **(inner if isinstance(inner, Mapping) else {})}.get("kv_cache_quant_algo")
    scheme = settings.get("kv_cache_scheme")
    if not named and isinstance(scheme, str):
        named = scheme
    elif not named and isinstance(scheme, Mapping):
        named = {"float": "fp", "int": "int"}.get(str(scheme.get("type")), "")
        named += str(scheme.get("num_bits", ""))
    return str(named or "").lower()


def cached(model: Model, rank: Rank, width: float) -> tuple[int, int]:
    """Bytes of a token in the cache of one rank, and of the states of one request."""
    cell = 0.0
    states = 0
    for layer in layers_of(rank, model):
        for block in layer.blocks:
            mixer = block.mixer
            if isinstance(mixer, Attention):
                cell += kv_heads(mixer.kv_heads, rank.heads) * pair(mixer) * width
                if isinstance(mixer, Picking):
                    cell += mixer.index * rank.width
            elif isinstance(mixer, Latent):
                cell += mixer.cached * width
            elif isinstance(mixer, Indexer):
                cell += mixer.cached  # bytes, whole on every rank
            elif isinstance(mixer, Recurrent):
                states += (mixer.conv * rank.width + mixer.state * 4) // rank.heads
    return int(cell), states


__all__ = ["cache_width", "cached"]
