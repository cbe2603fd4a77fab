"""Images and videos in vLLM's profiling run: the encoder runs on as many of the largest size as a
step may have, and its input and output stay while the language model runs.

Source: vLLM `v1/worker/gpu_model_runner.py` profile_run, `multimodal/encoder_budget.py` and
`v1/core/encoder_cache_manager.py` compute_mm_encoder_budget (0.8.5 to 0.24.0);
`worker/model_runner.py` _dummy_run (V0). What an encoder keeps is in `encoders.py`. Not counted:
attention that has no flash kernel (GPUs below 8.0, ROCm).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import NoneType
from typing import Any

from memfit.errors import Problem
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.serving.vllm.encoders import (
    ENCODERS,
    QWEN2_PIXELS,
    QWEN3_PIXELS,
    Encoder,
    Item,
    Step,
    largest_edge,
)

FP32 = 4
MOST_PIXELS = 2**30  # that memfit reads: an image of more than 32,768 pixels a side is none
WHOLE = ("whisper",)  # types whose config is the encoder's, too
NO_OBJECT = "`{}` must be a JSON object"


@dataclass(frozen=True, kw_only=True)
class Images:
    """Bytes that stay while the language model runs, and the encoder's own peak."""

    kept: int = 0
    peak: int = 0


def image_problems(options: Mapping[str, Any]) -> list[Problem]:
    """Limits of images, and of their pixels, that are none."""
    return [*limit_problems(options), *pixel_problems(options)]


def limit_problems(options: Mapping[str, Any]) -> list[Problem]:
    """Numbers of items that are no natural numbers."""
    limits = options.get("limit_mm_per_prompt") or {}
    where, hint = "limit_mm_per_prompt", 'like `{"image": 2, "video": 0}`'
    if not isinstance(limits, Mapping):
        return [Problem(message=NO_OBJECT.format(where), where=where, hint=hint)]
    return [
        Problem(
            message=f"`{kind[:20]}: {str(limit)[:40]}` must be an integer of at least 0",
            where=where,
            hint=hint,
        )
        for kind, limit in limits.items()
        if not is_integer(limit.get("count", 1) if isinstance(limit, Mapping) else limit, 0)
    ]


def pixel_problems(options: Mapping[str, Any]) -> list[Problem]:
    """A limit of pixels that is no positive integer, or larger than any image."""
    where, hint = "mm_processor_kwargs", 'like `{"max_pixels": 1003520}`'
    words = options.get("mm_processor_kwargs") or {}
    size = words.get("size") if isinstance(words, Mapping) else None
    if not isinstance(words, Mapping) or not isinstance(size, (Mapping, NoneType)):
        name = where if size is None else "size"
        return [Problem(message=NO_OBJECT.format(name), where=where, hint=hint)]
    edge = largest_edge(options)
    if edge is None or is_integer(edge, 1, MOST_PIXELS):
        return []
    return [
        Problem(
            message=f"`max_pixels: {str(edge)[:40]}` must be an integer from 1 to {MOST_PIXELS}",
            where=where,
            hint=f"the default is {QWEN2_PIXELS} for Qwen2.5-VL and {QWEN3_PIXELS} for Qwen3-VL",
        )
    ]


def is_integer(value: object, low: int, high: int = sys.maxsize) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def limits_of(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Most items of a request, by kind, as far as the options say."""
    limits: Mapping[str, Any] = options.get("limit_mm_per_prompt") or {}
    return limits


def text_only(options: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether no request may have an image, a video or a sound: the towers are then not loaded."""
    limits = limits_of(options)
    kinds = {
        "image": "vision_config" in config,
        "video": any(key.startswith("video_token") for key in config),
        "audio": "audio_config" in config,
    }
    none = all(limit_of(limits.get(kind, 1)) == 0 for kind, known in kinds.items() if known)
    return bool(options.get("language_model_only") or (limits and none))


def limit_of(value: Any) -> int:
    """Items of one kind in a request; newer versions take their size, too (`{"count": 1, …}`)."""
    return int(value.get("count", 1) if isinstance(value, Mapping) else value)


def most_items(item: Item, step: Step, limit: int) -> int:
    """Items of one step (encoder_budget.py _get_max_items)."""
    budget = max(step.batched, item.tokens) // item.tokens
    prompt = max(1, min(limit, step.length // item.tokens))
    return max(1, min(budget, step.requests * prompt))


def images(model: Model, config: Mapping[str, Any], step: Step) -> Images | None:
    """Bytes of images in the profiling run, zero where the model or the options have none; None
    where memfit does not know the encoder."""
    kind = str(config.get("model_type"))
    vision = config if kind in WHOLE else config.get("vision_config")
    skipped = step.options.get("skip_mm_profiling") or step.options.get("language_model_only")
    if not vision or skipped:
        return Images()
    make = ENCODERS.get(kind)
    if make is None or not isinstance(vision, Mapping):
        limits = limits_of(step.options)
        return Images() if limits and not any(map(limit_of, limits.values())) else None
    try:
        encoder = make(vision, model, step)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return None
    return counted(encoder, step)


def counted(encoder: Encoder, step: Step) -> Images:
    """Bytes of the items that the profiling run has."""
    given = limits_of(step.options)
    most = {one.kind: limit_of(given.get(one.kind, step.rules.items)) for one in encoder.items}
    allowed = [one for one in encoder.items if most[one.kind] > 0]
    if not allowed:
        return Images()
    if not step.rules.engine:
        return of_v0(encoder, allowed, most, step)
    item = max(allowed, key=lambda one: (one.tokens, one.kind))
    count = most_items(item, step, most[item.kind])
    data = step.options.get("mm_encoder_tp_mode") == "data"
    numbers = count * item.numbers
    patches = -(-count // step.ranks) * item.patches if data else count * item.patches
    inside = encoder.numbers(patches, 1 if data else step.ranks)
    return Images(
        kept=(numbers + count * item.tokens * encoder.output) * step.width,
        peak=(numbers + inside) * step.width,
    )


def of_v0(encoder: Encoder, allowed: list[Item], most: Mapping[str, int], step: Step) -> Images:
    """V0 runs encoder and language model in one pass of prompts that have every kind of item: the
    input, in fp32, the output, and the embeddings that both make stay."""
    tokens = sum(most[one.kind] * one.tokens for one in allowed)
    count = max(1, min(step.requests, step.batched // tokens))
    numbers = sum(count * most[one.kind] * one.numbers for one in allowed)
    patches = sum(count * most[one.kind] * one.patches for one in allowed)
    outputs = count * tokens * encoder.output * step.width
    return Images(
        kept=numbers * FP32 + outputs + step.batched * encoder.output * step.width,
        peak=numbers * (FP32 + step.width) + encoder.numbers(patches, step.ranks) * step.width,
    )
