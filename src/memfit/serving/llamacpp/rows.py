"""Published start-up logs of llama.cpp and Ollama as options of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memfit.errors import InputError
from memfit.model import catalog
from memfit.serving.base import Subject
from memfit.serving.llamacpp.builder import KINDS
from memfit.serving.llamacpp.convert import CONVERTERS, converted
from memfit.serving.llamacpp.versions import FIRST_GGUF

_TYPES = {
    "Q2_K - Medium": "Q2_K",
    "Q3_K - Small": "Q3_K_S",
    "Q3_K - Medium": "Q3_K_M",
    "Q3_K - Large": "Q3_K_L",
    "Q4_K - Small": "Q4_K_S",
    "Q4_K - Medium": "Q4_K_M",
    "Q5_K - Small": "Q5_K_S",
    "Q5_K - Medium": "Q5_K_M",
    "MXFP4 MoE": "MXFP4_MOE",
}


def quantization(printed: str) -> str:
    """The name of a file type as the log prints it (`ftype_name` of llama-model-loader.cpp)."""
    return _TYPES.get(printed, printed.partition(" - ")[0])


def row_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a row of a start-up log; its figures stand under `figures`."""
    stated = row
    if "kv_size" in stated:
        raise InputError.one("Ollama's own engine in Go is not supported", where="engine")
    found: dict[str, Any] = {"fit": "off"}
    for key, name in (
        ("n_ctx", "context"),
        ("n_seq_max", "parallel"),
        ("n_batch", "batch"),
        ("n_ubatch", "ubatch"),
    ):
        if isinstance(stated.get(key), int):
            found[name] = stated[key]
    if stated.get("swa_full"):
        found["swa_full"] = True
    if stated.get("kv_unified") is not None:
        found["unified"] = str(stated["kv_unified"]) == "true"
    if stated.get("file_type"):
        found["quant"] = quantization(str(stated["file_type"]))
    if stated.get("flash_attn") in (0, "0", "disabled"):
        found["flash"] = "off"
    elif stated.get("flash_attn") in (1, "1", "enabled"):
        found["flash"] = "on"
    layers = str(_figures(row).get("offloaded_layers") or "")
    if re.fullmatch(r"\d+/\d+", layers):
        found["gpu_layers"] = layers.partition("/")[0]
    kinds = _figures(row).get("kv_self_mib")
    if isinstance(kinds, list) and kinds and isinstance(kinds[0], Mapping):
        found["cache_k"] = str(kinds[0].get("k_type", "f16"))
        found["cache_v"] = str(kinds[0].get("v_type", "f16"))
        if not {found["cache_k"], found["cache_v"]} <= set(KINDS):
            raise InputError.one(
                f"cache type `{found['cache_k'][:20]}` belongs to a fork of llama.cpp", where="-ctk"
            )
    if re.search(r"(^|[/_-])(ppl|kld|perplexity)", str(stated.get("source") or "").lower()):
        found["all_outputs"] = True  # logits of every token
    if not stated_build(str(stated.get("version") or "")):
        found["build"] = era(stated)
    used = _used(_figures(row).get("buffers_mib") or {})
    if used:
        found["split"] = ",".join(str(int(one in used)) for one in range(max(used) + 1))
    backend = _backend(_figures(row).get("buffers_mib") or {})
    if backend:
        found["backend"] = backend
    return found


def _figures(row: Mapping[str, Any]) -> Mapping[str, Any]:
    figures = row.get("figures")
    return figures if isinstance(figures, Mapping) else {}


def stated_build(version: str) -> int:
    """The build that a row states; 0 where it states none, or the count of a shallow clone."""
    match = re.match(r"b?(\d{4,6})\b", version.strip())
    return int(match[1]) if match and int(match[1]) >= FIRST_GGUF else 0


def era(stated: Mapping[str, Any]) -> int:
    """A build of the time when the log had these lines: `n_ctx_per_seq` became `n_ctx_seq` in
    November 2025, and `kv_unified` came in July 2025 (llama-context.cpp)."""
    if "n_ctx_seq" in stated:
        return 8200
    return 6500 if "kv_unified" in stated else 5000


def _used(printed: Mapping[str, Any]) -> set[int]:
    """Numbers of the GPUs that hold weights, where they are not simply the first ones."""
    found = {
        int(match[1])
        for key in printed
        if (match := re.match(r"[A-Za-z]+(\d+)_(?:Mapped_)?model", key))
    }
    return found if found and found != set(range(len(found))) else set()


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


def row_figures(figures: Mapping[str, Any]) -> dict[str, float]:
    """The printed buffers, summed over the GPUs, under the names of the answer."""
    printed = figures.get("buffers_mib") or {}
    found: dict[str, float] = {}
    weighted = {
        match[1] for key in printed if (match := re.match(r"(.+?)_(?:Mapped_)?model_mib$", key))
    }
    for key, value in printed.items():
        size = value[0] if isinstance(value, list) and "compute" in key else value
        size = sum(size) if isinstance(size, list) else float(size)
        device, _, what = key.removesuffix("_mib").rpartition("_")
        weightless = weighted and device not in weighted
        if what == "compute" and re.search(r"\d$", device) and weightless:
            continue  # of a vision tower: its device has no weights of the model
        name = {"model": "model", "KV": "kv", "RS": "rs", "compute": "compute"}.get(what)
        if what == "output":
            found["output_mib"] = found.get("output_mib", 0.0) + size
        elif name is not None:
            host = device.startswith("CPU") or device.endswith("Host")
            label = f"{'host_' if host else ''}{name}_mib"
            found[label] = found.get(label, 0.0) + size
    return in_gib(found)


def in_gib(sizes: Mapping[str, float]) -> dict[str, float]:
    """The figures that the accuracy table compares: of the GPUs where there are any, else of the
    host; the cache wherever it lies."""
    found = dict(sizes)
    host = "host_" if found.get("host_model_mib") and not found.get("model_mib") else ""
    for name, key in (("weights_gib", "model_mib"), ("compute_gib", "compute_mib")):
        if found.get(host + key):
            found[name] = found[host + key] / 1024
    cache = found.get("kv_mib", 0.0) + found.get("host_kv_mib", 0.0)
    if cache:
        found["kv_gib"] = cache / 1024
    if found.get("rs_mib"):
        found["state_gib"] = found["rs_mib"] / 1024
    if found.get("model_mib") and found.get("compute_mib") and cache:
        parts = ("model_mib", "kv_mib", "rs_mib", "compute_mib")
        found["device_gib"] = sum(found.get(part, 0.0) for part in parts) / 1024
    return found


# ------------------------------------------------------------------ models


def row_subject(name: str, options: Mapping[str, Any]) -> Subject | None:
    """The catalog's model with the architecture, the layers and the parameters that a log prints;
    of several, the one whose name has most in common. Fine-tunes of a model have its sizes."""
    arch, layers = str(options.get("arch") or ""), options.get("n_layer")
    count = _count(str(options.get("model_params") or ""))
    if not arch or not isinstance(layers, int) or not count:
        return None
    wanted = _words(name)
    best: tuple[tuple[bool, int], str, Mapping[str, Any]] | None = None
    for known in catalog.names():
        entry = catalog.entry(known)
        stated = entry.parameters or entry.published
        if stated and not 0.8 < stated / count[0] < 1.25:
            continue
        for config in _readings(entry.config(), arch):
            if not _matches(config, known, arch, layers, count):
                continue
            own = config.get("model_type") == entry.config().get("model_type")
            score = (own, len(wanted & _words(known)))
            if best is None or score > best[0]:
                best = (score, known, config)
    if best is None:
        return None
    return Subject(name=best[1], config=best[2], origin="catalog, by the sizes that the log prints")


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+|[0-9.]+", name.lower()))


def _readings(config: Mapping[str, Any], arch: str) -> list[Mapping[str, Any]]:
    """A config as it is, and as Llama: some models were published in Llama's layout, too."""
    if arch == "llama" and config.get("model_type") == "phi3":
        return [config, {**config, "model_type": "llama"}]
    return [config]


def _matches(
    config: Mapping[str, Any], name: str, arch: str, layers: int, count: tuple[float, float]
) -> bool:
    inner = config.get("text_config", config)
    depth = next((inner[key] for key in _LAYERS if isinstance(inner.get(key), int)), layers)
    if depth != layers or config.get("model_type") not in CONVERTERS:
        return False
    try:
        model = converted(config, name, "F16")
    except InputError:
        return False
    size = sum(one.count for one in model.tensors if not one.name.startswith("rope_"))
    return model.arch == arch and abs(size / count[0] - 1) <= count[1]


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _count(printed: str) -> tuple[float, float] | None:
    """Parameters as printed, `8.03 B`, and how far rounding reaches."""
    match = re.fullmatch(r"([\d.]+) ([KMBT])", printed.strip())
    if match is None or not float(match[1]):
        return None
    digits = len(match[1].partition(".")[2])
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]]
    return float(match[1]) * scale, 0.51 * 10.0**-digits / float(match[1])
