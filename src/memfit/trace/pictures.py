"""Images for vision-language models, in the shapes that transformers' processors give them, and the
tokens that they take of a text.

Which names a model's `forward` has says in which shape it wants its images (transformers 5.23
models/*/processing_*.py, image_processing_*.py); how many tokens they become is asked of the model
itself, by a run of its `get_image_features`.
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
from memfit.trace.forms import Form, Inputs, Wanted, filling, first, forms_of, parameters, vision

PLACE = 4
USUAL = 448  # pixels of an image for models that take any size, where none is named


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """`make` gives the images of so many sequences; `tokens`: of the text, for one image; `start`,
    `end`: marks around them, if any."""

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
        one = [
            *([self.start] if self.start is not None else []),
            *[self.mark] * self.tokens,
            *([self.end] if self.end is not None else []),
        ]
        return one * self.count


def sees(model: Any) -> bool:
    """Whether images can be given beside a text."""
    return bool({"pixel_values", "flattened_patches"} & parameters(model))


def required(model: Any) -> bool:
    """Whether there is no text without them."""
    known = inspect.signature(model.forward).parameters
    return (
        "pixel_values" in known
        and "input_ids" in known
        and known["pixel_values"].default is inspect.Parameter.empty
    )


def pictures(model: Any, job: Job, device: str) -> Pictures:
    """The first shape and dtype that the model's own vision tower accepts; nothing else of the
    model is run."""
    size = size_of(model, job)
    wrong: list[str] = []
    kinds = dict.fromkeys(
        (torch.float32, model.dtype)
    )  # processors give fp32; models that do not cast it get their own dtype
    for form, kind in itertools.product(forms_of(model), kinds):

        def make(batch: int, kind: torch.dtype = kind, form: Form = form) -> Inputs:
            return form(
                Wanted(
                    model=model, batch=batch, images=job.images, size=size, kind=kind, device=device
                )
            )

        try:
            tokens = tokens_of(model, make(1), job.images)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as bad:
            wrong.append(" ".join(str(bad).split())[:160])
            continue
        return Pictures(
            make=make,
            count=job.images,
            size=size,
            tokens=tokens,
            mark=mark_of(model) if tokens else None,
            start=special(model.config, "vision_start_token_id"),
            end=special(model.config, "vision_end_token_id"),
        )
    name = type(model).__name__
    raise InputError.one(
        (
            f"`{name}` does not support images of {size[0]} x {size[1]} pixels: "
            f"{wrong[min(len(kinds), len(wrong)) - 1]}"
        ),
        where="job.images",
        hint="use another `image_size`, or none",
    )


def special(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def mark_of(model: Any) -> int | None:
    """The token that stands for images; any one where a mask says which do."""
    if "image_embeds_position_mask" in parameters(model):
        return PLACE
    named = getattr(model.config, "vocabulary_map", None) or {}  # Chameleon, Emu3
    config = getattr(model.config, "vlm_config", model.config)
    found = special(config, "image_token_id", "image_token_index") or named.get("<image>")
    return (
        special(model.config, "video_token_index") if found is None else found
    )  # images as the frames of one video


def tokens_of(model: Any, given: Inputs, images: int) -> int:
    """Tokens that one image takes: as many as the vision tower hands to the text model. 0 where it
    is looked at by cross-attention."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "image_embeds_position_mask" in parameters(base):
        return int(model.config.latent_query_num)
    inner = getattr(base, "model", None)
    if (
        within := getattr(inner, "vlm", None)
    ) is not None:  # a model that sees inside another gets its images one by one
        base, given = within, {name: value.flatten(0, 1) for name, value in given.items()}
    asks = [found for one in (base, inner) if (found := asked(one)) is not None]
    if not asks:
        embedded(base, given)
    if not asks or mark_of(model) is None:
        return 0
    ask = max(asks, key=lambda one: len(inspect.signature(one).parameters.keys() & given.keys()))
    known = inspect.signature(ask).parameters
    open_ended = any(one.kind is one.VAR_KEYWORD for one in known.values())
    with torch.no_grad():
        found = ask(
            **{
                name: value
                for name, value in given.items()
                if name in known or (open_ended and name in ("image_sizes",))
            }
        )
    rows = sum(one.shape[:-1].numel() for one in features(found))
    return rows // images


def embedded(model: Any, given: Inputs) -> None:
    """Where there is no tower to ask, the convolution that takes the pixels says whether it takes
    their dtype."""
    pixels = given.get("pixel_values")
    if pixels is None or pixels.dim() != 4:
        return
    for module in model.modules():
        if any(
            isinstance(one, torch.nn.Conv2d) and one.in_channels == pixels.shape[1]
            for one in module.children()
        ):
            if len(inspect.signature(module.forward).parameters) == 1:
                with torch.no_grad():
                    module(pixels)
            return


def asked(model: Any) -> Any:
    return getattr(model, "get_image_features", None) or getattr(model, "get_video_features", None)


def features(found: Any) -> Iterator[torch.Tensor]:
    """The tensors that take the place of image tokens."""
    if isinstance(found, torch.Tensor):
        yield found
    elif hasattr(found, "pooler_output") and found.pooler_output is not None:
        yield from features(found.pooler_output)
    elif getattr(
        found, "deepstack_features", None
    ):  # Granite 4 vision: the same tokens, for one layer after the other
        _, stack = found.deepstack_features[0]
        yield from features(stack)
    elif hasattr(found, "last_hidden_state"):
        yield found.last_hidden_state
    elif isinstance(found, (tuple, list)) and found:
        yield from (one for one in found if isinstance(one, torch.Tensor))


def size_of(model: Any, job: Job) -> tuple[int, int]:
    """Height and width: as asked, as the vision tower is made for, or a usual size."""
    if "image_position_ids" in parameters(model):
        side = first(vision(model), "patch_size", otherwise=16) * first(
            vision(model), "pooling_kernel_size", otherwise=3
        )
        high, wide = filling(model)
        return high * side, wide * side
    if job.image_size:
        return job.image_size, job.image_size
    free = {"image_grid_thw", "image_grid_hw", "target_sizes", "spatial_shapes"} & parameters(model)
    length = (
        USUAL
        if free
        else first(vision(model), "image_size", "img_size", "resolution", otherwise=USUAL)
    )
    if getattr(model.config, "image_grid_pinpoints", None):
        length *= 2  # seen in four tiles and as a whole
    return length, length


__all__ = ["Inputs", "Pictures", "parameters", "pictures", "required", "sees", "special"]
