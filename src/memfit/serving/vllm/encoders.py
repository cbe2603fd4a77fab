"""Encoders of images and videos: the largest item of each, and what the encoder keeps for it.

Each is counted in vLLM's own module, which is named below (0.8.5 to 0.24.0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt
from typing import Any

from memfit.lazy_dataclass import dataclass
from memfit.model.modules import Model
from memfit.serving.vllm.rules import Rules

# Limits of the processors that come with the checkpoints (preprocessor_config.json `max_pixels`,
# `size.longest_edge`), which no config.json has.
QWEN2_PIXELS, QWEN3_PIXELS = 12_845_056, 16_777_216
RATIO = 200  # of an image's sides, at most (qwen2_vl.py get_image_size_with_most_features)
GEMMA3_TOKENS, GEMMA3_BREAKS = 256, 4  # line breaks and marks around an image count before 0.13


@dataclass(frozen=True, kw_only=True)
class Item:
    """One image or video of the largest size: `tokens` that the language model gets, `patches` that
    the encoder sees, and `numbers` of the input."""

    kind: str
    tokens: int
    patches: int
    numbers: int


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """What an encoder's largest moment keeps for a patch beside the input: `whole` numbers, and
    `split` ones, which ranks share. `output` is the numbers of a token that leaves it."""

    items: tuple[Item, ...]
    moments: tuple[tuple[int, int], ...]
    output: int

    def patch(self, ranks: int) -> int:
        return max(whole + -(-split // ranks) for whole, split in self.moments)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What decides how many items are profiled."""

    options: Mapping[str, Any]
    length: int
    batched: int
    requests: int
    ranks: int
    width: int
    rules: Rules


def longest_side(tokens: int) -> int:
    """Of so many merged patches the most that an image has whose sides are not too unlike."""
    for count in range(tokens, 0, -1):
        short = next(one for one in range(isqrt(count), 0, -1) if count % one == 0)
        if count // short <= RATIO * short:
            return count
    return 1


def largest_edge(options: Mapping[str, Any]) -> object:
    """What the options say of the largest image, in pixels; None where they say nothing."""
    words = options.get("mm_processor_kwargs") or {}
    return words.get("max_pixels", (words.get("size") or {}).get("longest_edge"))


def largest(vision: Mapping[str, Any], options: Mapping[str, Any], pixels: int) -> Item:
    """Qwen's image of the most tokens (qwen2_vl.py get_max_image_tokens)."""
    edge = largest_edge(options)
    limit = edge if isinstance(edge, int) else pixels
    patch, merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
    tokens = longest_side(max(1, limit // (patch * merge) ** 2))
    patches = tokens * merge**2
    each = 3 * int(vision["temporal_patch_size"]) * patch**2
    return Item(kind="image", tokens=tokens, patches=patches, numbers=patches * each)


def qwen2(vision: Mapping[str, Any], model: Model, step: Step) -> Encoder:
    """Qwen2-VL and Qwen2.5-VL. A video has as many frames of the largest image as a request has
    tokens for (qwen2_vl.py get_num_frames_with_most_features); two frames are one grid.
    Moments: attention (input, norm; queries, keys and values, queries and keys before and after
    their rotation, the output), and the feed-forward (the layer's input, residual, norm)."""
    width = int(vision.get("embed_dim") or vision["hidden_size"])
    gated = "intermediate_size" in vision
    inner = int(vision.get("intermediate_size") or width * float(vision["mlp_ratio"]))
    image = largest(vision, step.options, QWEN2_PIXELS)
    grids = max(1, min(step.length // image.tokens, step.rules.frames // 2))
    video = Item(
        kind="video",
        tokens=image.tokens * grids,
        patches=image.patches * grids,
        numbers=image.numbers * grids,
    )
    return Encoder(
        items=(image, video),
        moments=((2 * width, 8 * width), (3 * width, (3 if gated else 2) * inner)),
        output=model.width,
    )


def qwen3(vision: Mapping[str, Any], model: Model, step: Step) -> Encoder:
    """Qwen3-VL, Qwen3.5 and Qwen3.6, whose positions stay beside the layers; a video of two frames
    has fewer tokens than an image (qwen3_vl.py get_max_video_tokens)."""
    width, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    stacked = 1 + len(vision.get("deepstack_visual_indexes") or ())
    return Encoder(
        items=(largest(vision, step.options, QWEN3_PIXELS),),
        moments=((3 * width, 8 * width), (4 * width, 2 * inner)),
        output=int(vision["out_hidden_size"]) * stacked,
    )


def gemma3(vision: Mapping[str, Any], model: Model, step: Step) -> Encoder:
    """SigLIP (siglip.py SiglipEncoderLayer): attention keeps its input and the norm beside queries,
    keys, values and the output; the feed-forward the layer's input, residual and norm."""
    width, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    side = int(vision["image_size"])
    image = Item(
        kind="image",
        tokens=GEMMA3_TOKENS + (GEMMA3_BREAKS if step.rules.marks_are_items else 0),
        patches=(side // int(vision["patch_size"])) ** 2,
        numbers=3 * side**2,
    )
    return Encoder(
        items=(image,),
        moments=((2 * width, 4 * width), (3 * width, 2 * inner)),
        output=model.width,
    )


# By `model_type` of the whole model.
ENCODERS: dict[str, Callable[[Mapping[str, Any], Model, Step], Encoder]] = {
    "qwen2_vl": qwen2,
    "qwen2_5_vl": qwen2,
    "qwen3_vl": qwen3,
    "qwen3_vl_moe": qwen3,
    "qwen3_5": qwen3,
    "qwen3_5_moe": qwen3,
    "gemma3": gemma3,
}
