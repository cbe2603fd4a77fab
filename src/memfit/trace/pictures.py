"""Images for vision-language models, in the shapes that transformers' processors give them, and the tokens that they take of a text.

Which names a model's `forward` has says in which shape it wants its images (transformers 5.23 models/*/processing_*.py,
image_processing_*.py); how many tokens they become is asked of the model itself, by a run of its `get_image_features`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from memfit.errors import InputError
from memfit.job import Job

USUAL = 448  # pixels of an image for models that take any size, where none is named
Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """`make` gives the images of so many sequences; `tokens`: of the text, for one image; `start`, `end`: marks around them, if any."""

    make: Callable[[int], Inputs]
    count: int  # in each sequence
    size: tuple[int, int]
    tokens: int
    mark: int | None
    start: int | None = None
    end: int | None = None

    @property
    def places(self) -> list[int]:
        """What one sequence begins with."""
        if self.mark is None:
            return []
        one = [*([self.start] if self.start is not None else []), *[self.mark] * self.tokens, *([self.end] if self.end is not None else [])]
        return one * self.count


def sees(model: Any) -> bool:
    """Whether images can be given beside a text."""
    return bool({"pixel_values", "flattened_patches"} & parameters(model))


def required(model: Any) -> bool:
    """Whether there is no text without them."""
    known = inspect.signature(model.forward).parameters
    return "pixel_values" in known and "input_ids" in known and known["pixel_values"].default is inspect.Parameter.empty


def parameters(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def pictures(model: Any, job: Job, device: str) -> Pictures:
    """The first shape and dtype that the model's own vision tower accepts; nothing else of the model is run."""
    forms = dict.fromkeys((form_of(model), plain))
    size = size_of(model, job)
    wrong: list[str] = []
    kinds = dict.fromkeys((torch.float32, model.dtype))  # processors give fp32; models that do not cast it get their own dtype
    for form, kind in itertools.product(forms, kinds):

        def make(batch: int, kind: torch.dtype = kind, form: Form = form) -> Inputs:
            return form(model, batch, job.images, size, kind, device)

        try:
            tokens = tokens_of(model, make(1), job.images)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as bad:
            wrong.append(" ".join(str(bad).split())[:160])
            continue
        mark = special(model.config, "image_token_id", "image_token_index")
        return Pictures(
            make=make, count=job.images, size=size, tokens=tokens, mark=mark if tokens else None,
            start=special(model.config, "vision_start_token_id"), end=special(model.config, "vision_end_token_id"),
        )  # fmt: skip
    name = type(model).__name__
    raise InputError.one(
        f"`{name}` does not take an image of {size[0]} x {size[1]} pixels: {wrong[0]}",
        where="job.images",
        hint="another `image_size`, or none",
    )


def special(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def tokens_of(model: Any, given: Inputs, images: int) -> int:
    """Tokens that one image takes: as many as the vision tower hands to the text model. 0 where it is looked at by cross-attention."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    ask = getattr(base, "get_image_features", None) or getattr(getattr(base, "model", None), "get_image_features", None)
    if ask is None or special(model.config, "image_token_id", "image_token_index") is None:
        return 0
    known = inspect.signature(ask).parameters
    open_ended = any(one.kind is one.VAR_KEYWORD for one in known.values())
    with torch.no_grad():
        found = ask(**{name: value for name, value in given.items() if name in known or (open_ended and name in ("image_sizes",))})
    rows = sum(one.shape[:-1].numel() for one in features(found))
    return rows // images


def features(found: Any) -> Iterator[torch.Tensor]:
    """The tensors that take the place of image tokens."""
    if isinstance(found, torch.Tensor):
        yield found
    elif hasattr(found, "pooler_output") and found.pooler_output is not None:
        yield from features(found.pooler_output)
    elif hasattr(found, "last_hidden_state"):
        yield found.last_hidden_state
    elif isinstance(found, (tuple, list)) and found:
        yield from (one for one in found if isinstance(one, torch.Tensor))


# -- sizes ----------------------------------------------------------------------------------------------------------------
def vision(model: Any) -> Any:
    config = model.config
    for name in ("vision_config", "vision_model_config", "vq_config", "encoder"):
        found = getattr(config, name, None)
        if found is not None:
            return found
    return config


def first(config: Any, *names: str, otherwise: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, int) and value > 0:
            return value
    return otherwise


def size_of(model: Any, job: Job) -> tuple[int, int]:
    """Height and width: as asked, as the vision tower is made for, or a usual size."""
    if job.image_size:
        return job.image_size, job.image_size
    free = {"image_grid_thw", "image_grid_hw"} & parameters(model)
    length = USUAL if free else first(vision(model), "image_size", "img_size", "resolution", otherwise=USUAL)
    return length, length


# -- shapes ---------------------------------------------------------------------------------------------------------------
def plain(model: Any, batch: int, images: int, size: tuple[int, int], kind: torch.dtype, device: str) -> Inputs:
    """(images, channels, height, width): CLIP, SigLIP and what is like them."""
    channels = first(vision(model), "num_channels", "in_channels", "in_chans", otherwise=3)
    return {"pixel_values": torch.empty((batch * images, channels, *size), dtype=kind, device=device)}


def by_sequence(model: Any, batch: int, images: int, size: tuple[int, int], kind: torch.dtype, device: str) -> Inputs:
    """(sequences, images, channels, height, width): Idefics 2 and 3, SmolVLM."""
    channels = first(vision(model), "num_channels", "in_channels", otherwise=3)
    return {"pixel_values": torch.empty((batch, images, channels, *size), dtype=kind, device=device)}


def patches(model: Any, batch: int, images: int, size: tuple[int, int], kind: torch.dtype, device: str) -> Inputs:
    """Patches in rows with their grid: Qwen2-VL and what is like it. An image is rounded to whole merged patches."""
    tower = vision(model)
    patch, merge = first(tower, "patch_size", otherwise=14), first(tower, "spatial_merge_size", "merge_size", otherwise=2)
    high, wide = (max(merge, length // (patch * merge) * merge) for length in size)
    channels = first(tower, "in_channels", "in_chans", "num_channels", otherwise=3)
    row = channels * first(tower, "temporal_patch_size", otherwise=1) * patch * patch
    grid = torch.tensor([[1, high, wide]] * (batch * images)).to(device)
    return {"pixel_values": torch.empty((batch * images * high * wide, row), dtype=kind, device=device), "image_grid_thw": grid}


def sized(model: Any, batch: int, images: int, size: tuple[int, int], kind: torch.dtype, device: str) -> Inputs:
    """Images with their sizes: Pixtral's in one piece, LLaVA-NeXT's in a whole view and tiles."""
    given = plain(model, batch, images, size, kind, device)
    grid = getattr(model.config, "image_grid_pinpoints", None)
    if grid:
        side = size[0]
        tiles = 1 + 4 if [2 * side, 2 * side] in [list(one) for one in grid] else 2
        pixels = given.pop("pixel_values")
        given["pixel_values"] = torch.empty((pixels.shape[0], tiles, *pixels.shape[1:]), dtype=kind, device=device)
        del pixels
        size = (2 * side, 2 * side)
    return {**given, "image_sizes": torch.tensor([list(size)] * (batch * images)).to(device)}


def tiled(model: Any, batch: int, images: int, size: tuple[int, int], kind: torch.dtype, device: str) -> Inputs:
    """Mllama: every image in as many tiles as the configuration allows, looked at by cross-attention."""
    tower = vision(model)
    tiles = first(tower, "max_num_tiles", otherwise=4)
    pixels = torch.empty((batch, images, tiles, first(tower, "num_channels", otherwise=3), *size), dtype=kind, device=device)
    ids = torch.ones((batch, images), dtype=torch.int64, device=device)
    return {
        "pixel_values": pixels,
        "aspect_ratio_ids": ids,
        "aspect_ratio_mask": torch.ones((batch, images, tiles), dtype=torch.int64, device=device),
    }


Form = Callable[[Any, int, int, tuple[int, int], torch.dtype, str], Inputs]
# By the names that a model's forward must have; the first that fits. None: the shape is not known here.
FORMS: tuple[tuple[str, Form | None], ...] = (
    ("aspect_ratio_ids", tiled), ("image_grid_thw", patches), ("image_grid_hw", None), ("target_sizes", None), ("pixel_values_local", None),
    ("spatial_shapes", None), ("image_position_ids", None), ("image_token_pooling", None), ("flattened_patches", None), ("bbox", None),
    ("image_patches", None), ("high_res_pixel_values", None), ("state", None), ("image_embeds_position_mask", None), ("qformer_input_ids", None),
    ("tile_fine_mask", None), ("perceiver_embeddings", None), ("pixel_attention_mask", by_sequence), ("image_sizes", sized),
)  # fmt: skip


def form_of(model: Any) -> Form:
    known = parameters(model)
    for name, form in FORMS:
        if name in known:
            if form is None:
                message = f"memfit does not know how `{type(model).__name__}` takes its images (`{name}`)"
                raise InputError.one(message, where="job.images", hint="without `images` its text is traced")
            return form
    return plain


__all__ = ["Inputs", "Pictures", "parameters", "pictures", "required", "sees", "special"]
