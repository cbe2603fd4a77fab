"""In which shapes transformers' processors hand images to a model: one form for each way, found by
the names of a model's `forward`.

Sizes follow transformers 5.23 models/*/image_processing_*.py and processing_*.py for square images.
Pixels are ones, because some models look whether an image is all zeros (padding), and whole numbers
are real.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """So many sequences with so many images each, of this height and width, in this dtype."""

    model: Any
    batch: int
    images: int
    size: tuple[int, int]
    kind: torch.dtype
    device: str

    @property
    def count(self) -> int:
        return self.batch * self.images

    @property
    def tower(self) -> Any:
        return vision(self.model)

    @property
    def channels(self) -> int:
        return first(self.tower, "num_channels", "in_channels", "in_chans", otherwise=3)

    def pixels(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=self.kind, device=self.device)

    def ones(self, *shape: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.ones(shape, dtype=kind, device=self.device)

    def each(self, row: Any) -> torch.Tensor:
        """The same numbers for every image."""
        return torch.tensor([row] * self.count).to(self.device)


Form = Callable[[Wanted], Inputs]


def parameters(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def vision(model: Any) -> Any:
    config = model.config
    for name in ("vision_config", "vision_model_config", "vq_config", "encoder", "vlm_config"):
        found = getattr(config, name, None)
        if found is not None:
            return getattr(found, "vision_config", found)
    return config


def first(config: Any, *names: str, otherwise: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, int) and value > 0:
            return value
    return otherwise


# -- whole images
# --------------------------------------------------------------------------------------------------
def plain(wanted: Wanted) -> Inputs:
    """(images, channels, height, width): CLIP, SigLIP and what is like them."""
    return {"pixel_values": wanted.pixels(wanted.count, wanted.channels, *wanted.size)}


def by_sequence(wanted: Wanted) -> Inputs:
    """(sequences, images, channels, height, width) with the pixels that are none: Idefics 2 and 3,
    SmolVLM."""
    return {
        "pixel_values": wanted.pixels(wanted.batch, wanted.images, wanted.channels, *wanted.size),
        "pixel_attention_mask": wanted.ones(wanted.batch, wanted.images, *wanted.size),
    }


def crossed(wanted: Wanted) -> Inputs:
    """(sequences, images, channels, height, width), looked at by cross-attention: Idefics."""
    return {
        "pixel_values": wanted.pixels(wanted.batch, wanted.images, wanted.channels, *wanted.size)
    }


def whole_tiles(wanted: Wanted) -> Inputs:
    """(sequences, tiles, channels, height, width) and which tiles are there: Granite Docling, an
    image in one tile."""
    shape = (wanted.batch, wanted.images)
    return {
        "pixel_values": wanted.pixels(*shape, wanted.channels, *wanted.size),
        "pixel_attention_mask": wanted.ones(*shape, kind=torch.bool),
    }


def twice(wanted: Wanted) -> Inputs:
    """Once small and once large: DeepSeek-VL's hybrid (its processor's 1024 pixels for the large
    one)."""
    large = wanted.pixels(wanted.count, wanted.channels, 1024, 1024)
    return {
        "pixel_values": wanted.pixels(wanted.count, wanted.channels, *wanted.size),
        "high_res_pixel_values": large,
    }


def questioned(wanted: Wanted) -> Inputs:
    """With a question for the Q-Former, whose tokens come with the text: InstructBLIP."""
    return {
        **plain(wanted),
        "qformer_input_ids": wanted.ones(wanted.batch, 8),
        "qformer_attention_mask": wanted.ones(wanted.batch, 8),
    }


def filmed(wanted: Wanted) -> Inputs:
    """The same with images as the frames of one video: InstructBLIP for videos."""
    shape = (wanted.batch, wanted.images, wanted.channels, *wanted.size)
    return {**questioned(wanted), "pixel_values": wanted.pixels(*shape)}


def sized(wanted: Wanted) -> Inputs:
    """Images with their sizes: Pixtral's in one piece, LLaVA-NeXT's in a whole view and the tiles
    of the best of its resolutions."""
    grid = getattr(wanted.model.config, "image_grid_pinpoints", None)
    if not grid:
        return {**plain(wanted), "image_sizes": wanted.each(list(wanted.size))}
    from transformers.image_processing_utils import select_best_resolution

    side = first(wanted.tower, "image_size", otherwise=336)
    high, wide = select_best_resolution(wanted.size, [list(one) for one in grid])
    tiles = 1 + math.ceil(high / side) * math.ceil(wide / side)
    return {
        "pixel_values": wanted.pixels(wanted.count, tiles, wanted.channels, side, side),
        "image_sizes": wanted.each(list(wanted.size)),
    }


def tiled(wanted: Wanted) -> Inputs:
    """Mllama: every image in as many tiles as the configuration allows, looked at by
    cross-attention."""
    tiles = first(wanted.tower, "max_num_tiles", otherwise=4)
    return {
        "pixel_values": wanted.pixels(
            wanted.batch, wanted.images, tiles, wanted.channels, *wanted.size
        ),
        "aspect_ratio_ids": wanted.ones(wanted.batch, wanted.images),
        "aspect_ratio_mask": wanted.ones(wanted.batch, wanted.images, tiles),
    }


# -- patches
# --------------------------------------------------------------------------------------------------
def grid_of(wanted: Wanted) -> tuple[int, int, int]:
    """The patches of an image rounded to whole merged ones: their rows, their columns, the pixels
    of one side."""
    tower = wanted.tower
    patch, merge = (
        first(tower, "patch_size", otherwise=14),
        first(tower, "spatial_merge_size", "merge_size", "merge_kernel_size", otherwise=2),
    )
    high, wide = (max(merge, length // (patch * merge) * merge) for length in wanted.size)
    return high, wide, patch


def patches(wanted: Wanted) -> Inputs:
    """Patches in rows with their grid: Qwen2-VL and what is like it."""
    high, wide, patch = grid_of(wanted)
    row = (
        wanted.channels
        * first(wanted.tower, "temporal_patch_size", "patch_temporal", otherwise=1)
        * patch
        * patch
    )
    found = {
        "pixel_values": wanted.pixels(wanted.count * high * wide, row),
        "image_grid_thw": wanted.each([1, high, wide]),
    }
    if "image_merge_sizes" in parameters(wanted.model):
        found["image_merge_sizes"] = wanted.ones(
            wanted.count
        )  # VideoLLaMA 3: images are not merged
    return found


def square_patches(wanted: Wanted) -> Inputs:
    """The same with patches of two dimensions: PaddleOCR-VL, Kimi."""
    high, wide, patch = grid_of(wanted)
    pixels = wanted.pixels(wanted.count * high * wide, wanted.channels, patch, patch)
    return {"pixel_values": pixels, "image_grid_thw": wanted.each([1, high, wide])}


def merged_patches(wanted: Wanted) -> Inputs:
    """The same with merged patches, channels last, counted by their own grid: Inkling 2."""
    high, wide, patch = grid_of(wanted)
    merge = first(wanted.tower, "spatial_merge_size", otherwise=2)
    high, wide, side = high // merge, wide // merge, patch * merge
    pixels = wanted.pixels(wanted.count * high * wide, side, side, wanted.channels)
    return {"pixel_values": pixels, "image_grid_thw": wanted.each([1, high, wide])}


def flat_grid(wanted: Wanted) -> Inputs:
    """The same with a grid of two numbers: Nemotron-H Omni."""
    found = patches(wanted)
    return {
        "pixel_values": found["pixel_values"],
        "image_grid_hw": wanted.each(found["image_grid_thw"][0, 1:].tolist()),
    }


def in_rows(wanted: Wanted) -> Inputs:
    """(images, patches, numbers of a patch): Fuyu."""
    config = wanted.model.config
    patch = first(config, "patch_size", otherwise=30)
    count = math.ceil(wanted.size[0] / patch) * math.ceil(wanted.size[1] / patch)
    return {"pixel_values": wanted.pixels(wanted.count, count, wanted.channels * patch * patch)}


# tokens of an image that Gemma 4's processor allows by default (image_processing_gemma4.py)
SOFT = 280


def filling(model: Any) -> tuple[int, int]:
    """Rows and columns of pools of an image that takes all soft tokens, as near to a square as
    there is."""
    high = next(rows for rows in range(math.isqrt(SOFT), 0, -1) if SOFT % rows == 0)
    return high, SOFT // high


def padded_with_places(wanted: Wanted) -> Inputs:
    """Gemma 4: an image is scaled to as many patches as its soft tokens allow; each comes with its
    place. A tower without layers gets whole pools (Gemma 4 unified)."""
    pool, patch = (
        first(wanted.tower, "pooling_kernel_size", otherwise=3),
        first(wanted.tower, "patch_size", otherwise=16),
    )
    high, wide = filling(wanted.model)
    if hasattr(wanted.tower, "num_hidden_layers"):
        high, wide = high * pool, wide * pool
    else:
        patch *= pool
    places = torch.cartesian_prod(torch.arange(high), torch.arange(wide)).flip(-1)
    return {
        "pixel_values": wanted.pixels(wanted.count, high * wide, wanted.channels * patch * patch),
        "image_position_ids": places.expand(wanted.count, -1, -1).contiguous().to(wanted.device),
    }


def padded_with_shapes(wanted: Wanted) -> Inputs:
    """LFM2-VL: tiles of 512 pixels and a small view of the whole, each padded to the patches of a
    tile, with their shapes."""
    patch, most, tile = first(wanted.tower, "patch_size", otherwise=16), 1024, 512
    merge = first(wanted.model.config, "downsample_factor", otherwise=2)
    side = max(1, min(wanted.size[0], tile) // (patch * merge)) * merge
    cut = 1 if wanted.size[0] <= tile else 2 if wanted.size[0] ** 2 <= 4.5 * tile**2 else 3
    count = wanted.count * (1 if cut == 1 else cut * cut + 1)
    mask = torch.zeros((count, most), dtype=torch.int32)
    mask[:, : side * side] = 1
    return {
        "pixel_values": wanted.pixels(count, most, wanted.channels * patch * patch),
        "spatial_shapes": torch.tensor([[side, side]] * count).to(wanted.device),
        "pixel_attention_mask": mask.to(wanted.device),
    }


def strips(wanted: Wanted) -> Inputs:
    """MiniCPM-V: all patches beside one another, (1, channels, patch, length), with the rows and
    columns of each image."""
    patch = first(wanted.tower, "patch_size", otherwise=14)
    high, wide = (max(4, length // (4 * patch) * 4) for length in wanted.size)
    return {
        "pixel_values": wanted.pixels(
            1, wanted.channels, patch, wanted.count * high * wide * patch
        ),
        "target_sizes": torch.tensor([[high, wide]] * wanted.count, dtype=torch.int32).to(
            wanted.device
        ),
    }


def flattened(wanted: Wanted) -> Inputs:
    """Pix2Struct, Kosmos-2.5: as many patches as the processor allows, each with its row and
    column; padding is all zeros."""
    marked = "image_embeds_position_mask" in parameters(wanted.model)
    most, patch = (4096 if marked else 2048), first(wanted.tower, "patch_size", otherwise=16)
    found = {
        "flattened_patches": wanted.pixels(wanted.count, most, 2 + wanted.channels * patch * patch)
    }
    return found if marked else {**found, "attention_mask": wanted.ones(wanted.count, most).float()}


def in_films(wanted: Wanted) -> Inputs:
    """(patches, frames, side, side, channels), an image as a short film that stands still: Inkling
    (image_processing_inkling.py)."""
    side = first(wanted.tower, "patch_size", otherwise=40)
    count = math.ceil(wanted.size[0] / side) * math.ceil(wanted.size[1] / side)
    frames = first(wanted.tower, "temporal_patch_size", otherwise=2)
    return {
        "pixel_values": wanted.pixels(wanted.count * count, frames, side, side, wanted.channels)
    }


MARGIN, CROPS, POOL = (
    4,
    8,
    2,
)  # of Molmo 2's processor: patches by which crops overlap, the most crops, the side of a pool


def pooled(wanted: Wanted) -> Inputs:
    """Molmo 2: a small view of the whole and overlapping crops as rows of patches, and for each
    token the patches pooled into it."""
    tower = wanted.tower
    patch, side = (
        first(tower, "patch_size", otherwise=14),
        first(tower, "image_size", otherwise=378),
    )
    count, margin = side // patch, 2 * MARGIN
    down, across = tiling(wanted.size, margin * patch, (count - margin) * patch)
    pools = [
        -(-rows // POOL)
        for rows in (
            count,
            count,
            down * (count - margin) + margin,
            across * (count - margin) + margin,
        )
    ]
    crops, tokens = 1 + down * across, pools[0] * pools[1] + pools[2] * pools[3]
    into = torch.arange(tokens * POOL * POOL).view(tokens, -1) % (crops * count * count)
    return {
        "pixel_values": wanted.pixels(
            wanted.count * crops, count * count, wanted.channels * patch * patch
        ),
        "image_token_pooling": into.repeat(wanted.count, 1).to(torch.int32).to(wanted.device),
        "image_grids": wanted.each(pools),
        "image_num_crops": wanted.each(crops),
    }


def tiling(size: tuple[int, int], margin: int, window: int) -> tuple[int, int]:
    """Rows and columns of crops: those that need the least enlargement, else the least shrinking
    (image_processing_molmo2.py)."""
    high, wide = (max(1, length - margin) for length in size)
    cuts = sorted(
        (
            (rows, columns)
            for rows in range(1, CROPS + 1)
            for columns in range(1, CROPS // rows + 1)
        ),
        key=lambda one: (one[0] * one[1], one[0]),
    )
    scales = {one: min(one[0] * window / high, one[1] * window / wide) for one in cuts}
    enough = [one for one in cuts if scales[one] >= 1]
    return min(enough, key=scales.__getitem__) if enough else max(cuts, key=scales.__getitem__)


# By the names that a model's forward must have; the first that fits.
FORMS: tuple[tuple[str, Form], ...] = (
    ("aspect_ratio_ids", tiled),
    ("image_grid_thw", patches),
    ("image_grid_hw", flat_grid),
    ("target_sizes", strips),
    ("pixel_values_local", plain),
    ("spatial_shapes", padded_with_shapes),
    ("image_position_ids", padded_with_places),
    ("image_token_pooling", pooled),
    ("flattened_patches", flattened),
    ("image_patches", in_rows),
    ("high_res_pixel_values", twice),
    ("state", whole_tiles),
    ("qformer_input_ids", questioned),
    ("tile_fine_mask", whole_tiles),
    ("perceiver_embeddings", crossed),
    ("pixel_attention_mask", by_sequence),
    ("image_sizes", sized),
)
OTHER: dict[Any, tuple[Form, ...]] = {
    patches: (square_patches, merged_patches),
    questioned: (filmed,),
    plain: (in_films,),
}  # tried where the first is not taken


def forms_of(model: Any) -> tuple[Form, ...]:
    known = parameters(model)
    for name, form in FORMS:
        if name in known:
            return (form, *OTHER.get(form, ()), plain)
    return (plain, *OTHER[plain])


__all__ = ["Form", "Inputs", "Wanted", "filling", "first", "forms_of", "parameters", "vision"]
