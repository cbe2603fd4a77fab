"""Encoders of images and videos: the largest item of each, and what the encoder keeps for it.

Each is counted in vLLM's own module, which is named below (0.8.5 to 0.27.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt
from typing import Any

from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.serving.vllm.rules import Rules

# Limits of the processors that come with the checkpoints (preprocessor_config.json `max_pixels`,
# `size.longest_edge`), which no config.json has.
QWEN2_PIXELS, QWEN3_PIXELS = 12_845_056, 16_777_216
RATIO = 200  # of an image's sides, at most (qwen2_vl.py get_image_size_with_most_features)
LLAMA4_TILES = 16  # preprocessor_config.json `max_patches`; a tile of the whole image comes on top
MASK_ALIGNMENT = 8  # ATen's sdpa copies a mask of other lengths (attention.cpp pad_bias)
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
    `split` ones, which ranks share. `masked`: a mask of all patches by all patches lies beside each
    moment; torch's attention, which is the moment `attention`, copies one of an odd length.
    `output` is the numbers of a token that leaves it."""

    items: tuple[Item, ...]
    moments: tuple[tuple[int, int], ...]
    output: int
    masked: bool = False
    attention: int = 0

    def numbers(self, patches: int, ranks: int) -> int:
        """Numbers that all patches of a pass keep on each of the ranks."""
        copied = patches % MASK_ALIGNMENT > 0
        most = max(
            whole
            + -(-split // ranks)
            + self.masked * (1 + (copied and at == self.attention)) * patches
            for at, (whole, split) in enumerate(self.moments)
        )
        return patches * most


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


def summed(width: int, step: Step) -> int:
    """The sum over the ranks, which is a copy of what each one projects (distributed/
    parallel_state.py _all_reduce_out_place)."""
    whole = step.ranks == 1 or step.options.get("mm_encoder_tp_mode") == "data"
    return 0 if whole else width


def qwen2(vision: Mapping[str, Any], model: Model, step: Step) -> Encoder:
    """Qwen2-VL and Qwen2.5-VL. A video has as many frames of the largest image as a request has
    tokens for (qwen2_vl.py get_num_frames_with_most_features); two frames are one grid.
    Moments: attention (input, norm; queries, keys and values, queries and keys before and after
    their rotation, the output, and its projection, beside which all of them stay), and the
    feed-forward (the layer's input, residual, norm).
    Qwen2.5-VL keeps its inner tensors until the feed-forward has its output, too. Its norm adds in
    place only where nothing is compiled (V0, `--enforce-eager`); else the attention's output and
    the layer's input stay beside the sum and the norm (layernorm.py forward_native, 0.23.0)."""
    width = int(vision.get("embed_dim") or vision["hidden_size"])
    gated = "intermediate_size" in vision
    inner = int(vision.get("intermediate_size") or width * float(vision["mlp_ratio"]))
    in_place = not step.rules.engine or step.options.get("enforce_eager")
    streams = 5 if gated and not in_place else 3
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
        moments=(
            (3 * width + summed(width, step), 8 * width),
            (streams * width, (3 if gated else 2) * inner),
        ),
        output=model.width,
    )


def qwen3(vision: Mapping[str, Any], model: Model, step: Step) -> Encoder:
    """Qwen3-VL, Qwen3.5 and Qwen3.6, whose positions stay beside the layers; a video of two frames
    has fewer tokens than an image (qwen3_vl.py get_max_video_tokens)."""
    width, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    stacked = 1 + len(vision.get("deepstack_visual_indexes") or ())
    return Encoder(
        items=(largest(vision, step.options, QWEN3_PIXELS),),
        moments=((4 * width + summed(width, step), 8 * width), (4 * width, 2 * inner)),
        output=int(vision["out_hidden_size"]) * stacked,
    )


def layers_of(width: int, inner: int) -> tuple[tuple[int, int], ...]:
    """Moments of a plain vision transformer. Whoever calls the layers holds the first one's input.
    Attention keeps its layer's input and the norm beside queries, keys, values and the output; the
    feed-forward the layer's input, residual and norm beside two inner tensors (siglip.py, clip.py,
    intern_vit.py)."""
    return ((3 * width, 4 * width), (4 * width, 2 * inner))


def gemma3(vision: Mapping[str, Any], model: Model, step: Step) -> Encoder:
    """SigLIP."""
    side = int(vision["image_size"])
    image = Item(
        kind="image",
        tokens=GEMMA3_TOKENS + (GEMMA3_BREAKS if step.rules.marks_are_items else 0),
        patches=(side // int(vision["patch_size"])) ** 2,
        numbers=3 * side**2,
    )
    moments = layers_of(int(vision["hidden_size"]), int(vision["intermediate_size"]))
    return Encoder(items=(image,), moments=moments, output=model.width)


def llava(vision: Mapping[str, Any], model: Model, step: Step) -> Encoder:
    """LLaVA with CLIP, whose class token is a patch and not a token of the text; or Pixtral."""
    if vision.get("model_type") == "pixtral":
        return pixtral(vision, model, step, merged=1)
    side = int(vision["image_size"])
    tokens = (side // int(vision["patch_size"])) ** 2
    image = Item(kind="image", tokens=tokens, patches=tokens + 1, numbers=3 * side**2)
    moments = layers_of(int(vision["hidden_size"]), int(vision["intermediate_size"]))
    return Encoder(items=(image,), moments=moments, output=model.width)


def mistral3(vision: Mapping[str, Any], model: Model, step: Step) -> Encoder:
    return pixtral(vision, model, step, merged=int(model.config.get("spatial_merge_size") or 2))


def pixtral(vision: Mapping[str, Any], model: Model, step: Step, merged: int) -> Encoder:
    """Pixtral's tower as transformers stores it (pixtral.py PixtralHFVisionModel). All images of a
    pass are one sequence, and without xFormers their mask has a number for each pair of patches.
    The convolution's output and the first layer's input stay. Moments: queries and keys as they are
    rotated; attention, which copies a mask of an odd length; the feed-forward, where the
    attention's result stays beside the layer's input, their sum and the norm."""
    width, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    side, patch = int(vision["image_size"]), int(vision["patch_size"])
    rows = -(-side // (patch * merged))
    image = Item(
        kind="image",
        tokens=rows * (rows + 1) if step.rules.marks_are_items else rows**2,
        patches=(side // patch) ** 2,
        numbers=3 * side**2,
    )
    tables = 2 * (width // int(vision["num_attention_heads"]))
    return Encoder(
        items=(image,),
        moments=(
            (4 * width + tables, 7 * width),
            (4 * width + tables, 6 * width),
            (6 * width + tables, 3 * inner),
        ),
        masked=not step.rules.xformers,
        attention=1,
        output=model.width,
    )


def llama4(vision: Mapping[str, Any], model: Model, step: Step) -> Encoder:
    """Llama 4: tiles, each with a class token, whose patches are merged by the pixel shuffle. Its
    queries and keys are rotated in fp32, as complex numbers, before they are 16-bit again
    (mllama4.py, rotary_embedding/llama4_vision_rope.py)."""
    width, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    side, tiles = int(vision["image_size"]), LLAMA4_TILES + 1
    patches = (side // int(vision["patch_size"])) ** 2
    tokens = int(patches * float(vision["pixel_shuffle_ratio"]) ** 2)
    image = Item(
        kind="image",
        tokens=tiles * tokens,
        patches=tiles * (patches + 1),
        numbers=tiles * 3 * side**2,
    )
    rotated = (3 * width, (3 + 4 * 2 + 2) * width)
    return Encoder(
        items=(image,), moments=(rotated, layers_of(width, inner)[1]), output=model.width
    )


def internvl(vision: Mapping[str, Any], model: Model, step: Step) -> Encoder:
    """InternVL: tiles and the whole image as one more, each with a class token (internvl.py
    get_image_size_with_most_features, intern_vit.py)."""
    config = model.config
    size, patch = first(vision["image_size"]), first(vision["patch_size"])
    side = int(config.get("force_image_size") or size)
    most = int(config.get("max_dynamic_patch") or 12)
    tiles = most + (most > 1 and bool(config.get("use_thumbnail", True)))
    patches = (side // patch) ** 2
    tokens = int(patches * float(config.get("downsample_ratio") or 0.5) ** 2)
    image = Item(
        kind="image",
        tokens=tiles * tokens,
        patches=tiles * (patches + 1),
        numbers=tiles * 3 * side**2,
    )
    moments = layers_of(int(vision["hidden_size"]), int(vision["intermediate_size"]))
    return Encoder(items=(image,), moments=moments, output=model.width)


def whisper(config: Mapping[str, Any], model: Model, step: Step) -> Encoder:
    """Whisper: half a minute of sound, of which the first convolution leaves two columns for each
    one behind the second (whisper.py)."""
    width, length = int(config["d_model"]), int(config["max_source_positions"])
    sound = Item(
        kind="audio",
        tokens=length,
        patches=length,
        numbers=2 * length * int(config["num_mel_bins"]),
    )
    moments = layers_of(width, int(config["encoder_ffn_dim"]))
    return Encoder(items=(sound,), moments=((4 * width, 0), *moments), output=width)


def first(value: Any) -> int:
    """A number, or the first of a list of them."""
    return int(value[0] if isinstance(value, list) else value)


# By `model_type` of the whole model.
ENCODERS: dict[str, Callable[[Mapping[str, Any], Model, Step], Encoder]] = {
    "qwen2_vl": qwen2,
    "qwen2_5_vl": qwen2,
    "qwen3_vl": qwen3,
    "qwen3_vl_moe": qwen3,
    "qwen3_5": qwen3,
    "qwen3_5_moe": qwen3,
    "gemma3": gemma3,
    "llava": llava,
    "mistral3": mistral3,
    "llama4": llama4,
    "internvl": internvl,
    "internvl_chat": internvl,
    "whisper": whisper,
}
