"""TensorRT-LLM with its PyTorch back end (1.x): after a dry run over the largest step the cache
gets a fraction of what is free.

Source: NVIDIA/TensorRT-LLM `tensorrt_llm/_torch/pyexecutor/_util.py` KvCacheCreator (0.20 to 1.3),
`llmapi/llm_args.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from memfit.errors import Problem
from memfit.model.named import by_name, split_name
from memfit.serving.base import Device, Subject
from memfit.serving.paged.engine import Held, Paged, Setup, model_option, share, silent, unsupported
from memfit.serving.paged.engine import option as dashed
from memfit.serving.subject import subject_from

option = partial(dashed, underscores=True)
BUILT = ("engine_mib", "execution_context_mib", "runtime_gpu_mib")  # of an engine's own log
FRACTION = 0.9  # KvCacheConfig.free_gpu_memory_fraction


def budget(setup: Setup, device: Device, held: Held) -> int:
    """(total - peak) × fraction: the peak is that of the dry run, with all that lives outside
    torch."""
    fraction = share(setup, "kv_cache_free_gpu_memory_fraction", FRACTION)
    return int((device.total - held.all) * fraction)


def refuses(options: Mapping[str, Any]) -> list[Problem]:
    """Engines that were built are another runtime."""
    if options.get("backend") != "tensorrt":
        return []
    return [
        Problem(
            message="not supported yet: engines that `trtllm-build` made",
            where="backend",
            hint="`--backend pytorch` is what `trtllm-serve` runs since 1.0",
        )
    ]


def named(name: str) -> Subject | None:
    """A quantized model without an owner is NVIDIA's own, made with ModelOpt for this engine."""
    whole = f"nvidia/{name}"
    if "/" in name or split_name(whole)[1] is None:
        return None
    source = by_name(whole)
    return None if source is None else subject_from(source)


def log_lines(figures: Mapping[str, float]) -> tuple[str, ...]:
    """What its log says of the cache."""
    return (
        f"Estimated max memory in KV cache : {figures['available_kv_gib']:.2f} GiB",
        (
            f"[MemUsageChange] Allocated {figures['kv_gib']:.2f} GiB for max tokens in paged KV "
            f"cache ({int(figures['kv_tokens'])})."
        ),
    )


def row_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a published row under the names of `trtllm-serve`."""
    built = any(row.get("figures", {}).get(one) for one in BUILT)
    return {
        "backend": "tensorrt" if built or row.get("kv_cache_free_gpu_mem_fraction") else None,
        "tp_size": row.get("tp_size") or row.get("tensor_parallel_size"),
        "kv_cache_free_gpu_memory_fraction": row.get("kv_cache_free_gpu_memory_fraction")
        or row.get("kv_cache_free_gpu_mem_fraction"),
    }


def row_figures(figures: Mapping[str, Any]) -> dict[str, float]:
    """Weights under the answer's name: the runtime of a built engine holds nothing else."""
    found = figures.get("weights_gib") or figures.get("weights_inside_torch_gib")
    built = figures.get("engine_mib") or figures.get("runtime_gpu_mib")
    if not found and isinstance(built, (int, float)):
        found = built / 1024
    return {"weights_gib": float(found)} if isinstance(found, (int, float)) else {}


ENGINE = Paged(
    name="tensorrt-llm",
    title="TensorRT-LLM",
    newest="1.2.0",
    options=(
        option("tp_size", "int", "GPUs that share each layer", low=1, means="tensor"),
        option("pp_size", "int", "GPUs that share the layers", low=1, means="stages"),
        option(
            "max_batch_size", "int", "most requests at once", default="2048", low=1, means="users"
        ),
        option("max_num_tokens", "int", "tokens of the largest step", default="8192", low=1),
        option(
            "max_seq_len",
            "size",
            "tokens of the longest request [default: the model's own]",
            means="context",
        ),
        option(
            "kv_cache_free_gpu_memory_fraction",
            "float",
            "share of the free memory for the cache",
            "--free_gpu_memory_fraction",
            default="0.9",
            low=0,
            high=1,
        ),
        option(
            "kv_cache_dtype",
            "text",
            "numbers of the cache",
            default="auto",
            choices=("auto", "fp8"),
        ),
        option(
            "backend", "text", "what runs the model", choices=("pytorch", "_autodeploy", "tensorrt")
        ),
        *silent("host", "port", "log_level", "tokenizer"),
        model_option("model"),
        *unsupported("extra_llm_api_options"),
        *silent("trust_remote_code", kind="flag"),
    ),
    starts=(("trtllm-serve", "serve"), ("trtllm-serve",)),
    model_flags=("--model",),
    tensor="tp_size",
    pipeline="pp_size",
    length="max_seq_len",
    step="max_num_tokens",
    steps=8192,
    block=32,
    modelopt=True,
    refuses=refuses,
    names=named,
    budget=budget,
    log=log_lines,
    rows=row_options,
    figures=row_figures,
)
