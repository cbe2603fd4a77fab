"""Published start-up logs of llama.cpp and Ollama as options of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TYPES = {
    "Q2_K - Medium": "Q2_K",
    "Q3_K - Small": "Q3_K_S",
    "Q3_K - Medium": "Q3_K_M",
    "Q3_K - Large": "Q3_K_L",
    "Q4_K - Small": "Q4_K_S",
    "Q4_K - Medium": "Q4_K_M",
    "Q5_K - Small": "Q5_K_S",
    "Q5_K - Medium": "Q5_K_M",
}


def quantization(printed: str) -> str:
    """The name of a file type as the log prints it (`ftype_name` of llama-model-loader.cpp)."""
    return _TYPES.get(printed, printed.partition(" - ")[0])


def row_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a row of a start-up log."""
    stated = row.get("options") or {}
    found: dict[str, Any] = {"fit": "off"}
    for key, name in (
        ("n_ctx", "context"),
        ("n_seq_max", "parallel"),
        ("n_batch", "batch"),
        ("n_ubatch", "ubatch"),
    ):
        if isinstance(stated.get(key), int):
            found[name] = stated[key]
    if stated.get("kv_unified") is not None:
        found["unified"] = str(stated["kv_unified"]) == "true"
    if stated.get("file_type"):
        found["quant"] = quantization(str(stated["file_type"]))
    if stated.get("flash_attn") in (0, "0", "disabled"):
        found["flash"] = "off"
    layers = str(_figures(row).get("offloaded_layers") or "")
    if re.fullmatch(r"\d+/\d+", layers):
        found["gpu_layers"] = layers.partition("/")[0]
    kinds = _figures(row).get("kv_self_mib")
    if isinstance(kinds, list) and kinds and isinstance(kinds[0], Mapping):
        found["cache_k"] = str(kinds[0].get("k_type", "f16"))
        found["cache_v"] = str(kinds[0].get("v_type", "f16"))
    backend = _backend(_figures(row).get("buffers_mib") or {})
    if backend:
        found["backend"] = backend
    return found


def _figures(row: Mapping[str, Any]) -> Mapping[str, Any]:
    figures = row.get("figures")
    return figures if isinstance(figures, Mapping) else {}


def _backend(printed: Mapping[str, Any]) -> str:
    """The backend whose buffers a log prints."""
    for prefix, backend in (
        ("CUDA", "cuda"),
        ("ROCm", "rocm"),
        ("Vulkan", "vulkan"),
        ("Metal", "metal"),
        ("MTL", "metal"),
    ):
        if any(key.startswith(prefix) for key in printed):
            return backend
    return ""


def row_figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The printed buffers, summed over the GPUs, under the names of the answer."""
    printed = _figures(row).get("buffers_mib") or {}
    found: dict[str, float] = {}
    for key, value in printed.items():
        size = value[0] if isinstance(value, list) and "compute" in key else value
        size = sum(size) if isinstance(size, list) else float(size)
        device, _, what = key.removesuffix("_mib").rpartition("_")
        name = {"model": "model", "KV": "kv", "RS": "rs", "compute": "compute"}.get(what)
        if what == "output":
            found["output_mib"] = found.get("output_mib", 0.0) + size
        elif name is not None:
            host = device.startswith("CPU") or device.endswith("Host")
            label = f"{'host_' if host else ''}{name}_mib"
            found[label] = found.get(label, 0.0) + size
    parts = ("model_mib", "kv_mib", "rs_mib", "compute_mib")
    if {"model_mib", "compute_mib"} <= set(found):
        found["device_mib"] = sum(found.get(part, 0.0) for part in parts)
    return found
