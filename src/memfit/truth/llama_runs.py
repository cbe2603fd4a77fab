"""Rows of llama.cpp and its fork ik_llama.cpp that have one figure each, gathered by run.

Only what a row settles is compared: weights and cache of the whole model, wherever they lie. How
tensors were placed is not printed, and a fork's own number formats have sizes of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memfit.serving.llamacpp.rows import quantization

FORK, MAIN = "ik_llama.cpp", "llama.cpp"
WHOLE = {"weights": "model_gib", "kv_cache": "kv_gib"}
# A number of bits that llama.cpp itself writes; the fork adds K, KS, KSS, KT and repacked R4, R8.
PLAIN = re.compile(r"(F16|F32|BF16|Q[0-9]_([01]|K(_[SML])?)|IQ[0-9]_(XXS|XS|S|M|NL))")
UNKNOWN = "F16"  # stands for the fork's formats, where the weights are not compared
# Builds of llama.cpp that cache as a log says: latents alone (`mla=2` and 3 of the fork), latents
# and their transposed copy. Keys and values of all heads are cached of files made before both.
LATENT_ALONE, LATENT_TWICE = "b8200", "b6500"


def is_llama(value: Mapping[str, Any]) -> bool:
    """Whether a row is a figure of a whole model that llama.cpp or its fork printed."""
    engine = str(value.get("engine") or "").lower()
    scope = str(value.get("scope") or "")
    return MAIN in engine and value.get("metric") in WHOLE and scope.startswith("whole")


def gather_llama(gathered: dict[tuple[str, ...], dict[str, Any]], value: Mapping[str, Any]) -> None:
    """One figure of a run joins the others of it."""
    extra = value.get("extra")
    extra = extra if isinstance(extra, Mapping) else {}
    names = ("source", "model", "engine", "seq", "dtype", "attention", "parallel")
    key = (*(str(value.get(name)) for name in names), str(extra.get("n_ubatch")))
    run = gathered.get(key)
    if run is None:
        engine = FORK if FORK in str(value.get("engine")).lower() else MAIN
        run = {**value, "engine": engine, "engine_version": LATENT_TWICE}
        options = options_of(value, extra)
        run["model"] = re.sub(r"\s*\[.*", "", str(value.get("model")))
        if engine == FORK:  # one cache for all layers, windows or not
            options["swa_full"] = True
        gathered[key] = {**run, "figures": figures_of(value), "options": options}
    size = value.get("value_gib")
    name, run = WHOLE[str(value["metric"])], gathered[key]
    if name == "kv_gib":
        notes = str(value.get("notes") or "")
        run["engine_version"] = LATENT_ALONE if "not used" in notes else LATENT_TWICE
        if extra.get("arch") == "deepseek2" and "c^KV" not in notes and not absorbed(extra):
            return
    elif not compares_weights(value, extra):
        return
    else:
        size = file_size(extra) or size
    if isinstance(size, (int, float)):
        run["figures"][name] = float(size)


def file_size(extra: Mapping[str, Any]) -> float:
    """GiB of all tensors as the log prints them (`model size`): a sum of buffers counts pages
    twice where a file is mapped."""
    found = re.match(
        r"([0-9.]+) (GiB|MiB)", str(extra.get("model size") or extra.get("file size") or "")
    )
    return float(found[1]) / (1024 if found[2] == "MiB" else 1) if found else 0.0


def absorbed(extra: Mapping[str, Any]) -> bool:
    """Whether one head of keys, the latent, is cached for all."""
    return str(extra.get("n_head_kv")) == "1"


def quantization_of(value: Mapping[str, Any]) -> str:
    """The number format in the brackets of a model's name, `Q4_K - Medium` as `Q4_K_M`."""
    found = re.search(r"\[([^\]]+)\]", str(value.get("model") or ""))
    return quantization(found[1]) if found else ""


def compares_weights(value: Mapping[str, Any], extra: Mapping[str, Any]) -> bool:
    """Whether llama.cpp's own rules say how large the weights are: not of the fork's formats, nor
    of its files that hold latent attention's projections twice, nor where several recipes share a
    name and the row's bits for each weight do not tell."""
    return bool(PLAIN.fullmatch(quantization_of(value))) and not doubled(extra)


def doubled(extra: Mapping[str, Any]) -> bool:
    """Files of latent attention made by the fork hold `attn_k_b` and `attn_v_b` beside
    `attn_kv_b`: 2 x heads x 128 x 512 more in each layer."""
    return str(extra.get("arch")) == "deepseek2" and parameters(extra) != str(
        extra.get("model params") or ""
    )


def parameters(extra: Mapping[str, Any]) -> str:
    """Printed parameters, less what the fork keeps twice where they are those of DeepSeek-V3."""
    printed = str(extra.get("model params") or "")
    return {"672.050 B": "671.026 B"}.get(printed, printed)


def figures_of(value: Mapping[str, Any]) -> dict[str, Any]:
    kinds = re.search(r"KV ([\w/]+)", str(value.get("dtype") or ""))
    k_type, _, v_type = (kinds[1] if kinds else "f16").partition("/")
    return {
        "offloaded_layers": "0/0",
        "kv_self_mib": [{"k_type": k_type, "v_type": v_type or k_type}],
    }


def options_of(value: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a run in the words of a start-up log."""
    found: dict[str, Any] = {
        "n_ctx": value.get("seq"),
        "n_seq_max": number(extra.get("n_seq_max")) or 1,
        "n_batch": number(extra.get("n_batch")) or value.get("batch"),
        "n_ubatch": number(extra.get("n_ubatch")) or 512,
        "arch": extra.get("arch"),
        "n_layer": number(extra.get("n_layer")),
        "model_params": parameters(extra),
    }
    name = quantization_of(value)
    found["file_type"] = name if PLAIN.fullmatch(name) else UNKNOWN
    attention = str(value.get("attention") or "")
    if "flash_attn=0" in attention:
        found["flash_attn"] = 0
    return found


def number(text: Any) -> int:
    return int(text) if str(text).isdecimal() else 0


__all__ = ["FORK", "MAIN", "gather_llama", "is_llama"]
