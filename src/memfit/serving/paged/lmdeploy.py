"""LMDeploy's TurboMind engine (0.16): once the weights are loaded, the cache gets a fraction of
what is free; steps run in what is left.

Source: InternLM/lmdeploy@1263d5c `src/turbomind/turbomind.cc` CreateEngine, `lmdeploy/messages.py`
TurbomindEngineConfig.
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.serving.base import Device
from memfit.serving.paged.engine import (
    Held,
    Paged,
    Setup,
    model_option,
    option,
    share,
    silent,
    unsupported,
)

FRACTION = 0.8  # cache_max_entry_count


def budget(setup: Setup, device: Device, held: Held) -> int:
    """A share of the free memory after loading."""
    fraction = share(setup, "cache_max_entry_count", FRACTION)
    return int((device.total - held.context - held.weights - held.outside) * fraction)


def log_lines(figures: Mapping[str, float]) -> tuple[str, ...]:
    """What its log says of the cache."""
    return (f"Object cache budget: {figures['available_kv_gib'] * 1024:.2f} MB",)


ENGINE = Paged(
    name="lmdeploy",
    title="LMDeploy",
    newest="0.16.0",
    options=(
        option("tp", "int", "GPUs that share each layer", low=1, means="tensor"),
        option(
            "session_len",
            "size",
            "tokens of the longest request [default: the model's own]",
            means="context",
        ),
        option(
            "cache_max_entry_count",
            "float",
            "share of the free memory for the cache",
            default="0.8",
            low=0,
            high=1,
        ),
        option("max_prefill_token_num", "int", "tokens of a step", default="8192", low=1),
        option("quant_policy", "text", "bits of the cache: 0, 4 or 8", choices=("0", "4", "8")),
        option(
            "dtype",
            "text",
            "numbers of weights",
            default="auto",
            choices=("auto", "float16", "bfloat16"),
        ),
        *silent("max_batch_size", "cache_block_seq_len", "model_name", "backend"),
        model_option("model_path"),
        *unsupported("model_format"),
        *silent("server_name", "server_port", "log_level", "revision", "download_dir"),
        *silent("enable_prefix_caching", "trust_remote_code", kind="flag"),
    ),
    starts=(("lmdeploy", "serve", "api_server"), ("lmdeploy", "chat")),
    model_flags=("--model-path",),
    tensor="tp",
    length="session_len",
    step="max_prefill_token_num",
    steps=8192,
    block=64,
    caches="quant_policy",
    budget=budget,
    log=log_lines,
)
