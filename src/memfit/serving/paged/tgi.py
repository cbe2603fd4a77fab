"""Text Generation Inference (3.x): after a warm-up prefill the cache gets what is free, less a
tenth of the card.

Source: huggingface/text-generation-inference@db931fc `server/text_generation_server/models/
flash_causal_lm.py` warmup, `models/globals.py` TGI_WIGGLE_ROOM, `utils/import_utils.py`
get_cuda_free_memory; `launcher/src/main.rs` (where the launcher does not know the card's speed, the
warm-up has 4,096 tokens).
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

ROOM = 0.9  # TGI_WIGGLE_ROOM


def budget(setup: Setup, device: Device, held: Held) -> int:
    """What is free after the warm-up, less the share of the card that stays free."""
    fraction = share(setup, "cuda_memory_fraction", 1.0)
    return int(device.total * fraction * ROOM - held.all)


def log_lines(figures: Mapping[str, float]) -> tuple[str, ...]:
    """What its log says of the cache, with one token a block as FlashInfer has it."""
    return (f"KV-cache blocks: {int(figures['kv_tokens'])}, size: 1",)


ENGINE = Paged(
    name="tgi",
    title="Text Generation Inference",
    newest="3.3.7",
    options=(
        model_option("model_id"),
        option("num_shard", "int", "GPUs that share each layer", low=1, means="tensor"),
        option("max_total_tokens", "size", "tokens of the longest request"),
        option("max_input_tokens", "size", "tokens of the longest prompt", silent=True),
        option("max_batch_prefill_tokens", "int", "tokens of the warm-up", default="4096", low=1),
        option(
            "cuda_memory_fraction",
            "float",
            "share of the card that it may use",
            default="1.0",
            low=0,
            high=1,
        ),
        option(
            "kv_cache_dtype", "text", "numbers of the cache", choices=("fp8_e4m3fn", "fp8_e5m2")
        ),
        option("dtype", "text", "numbers of weights", choices=("float16", "bfloat16")),
        *silent("hostname", "port", "revision", "max_concurrent_requests"),
        *unsupported("quantize"),
        *silent("sharded", "trust_remote_code", "json_output", kind="flag"),
    ),
    starts=(("text-generation-launcher",),),
    model_flags=("--model-id", "--model_id"),
    tensor="num_shard",
    length="max_total_tokens",
    step="max_batch_prefill_tokens",
    steps=4096,
    budget=budget,
    log=log_lines,
)
