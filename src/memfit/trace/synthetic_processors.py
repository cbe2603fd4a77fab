"""Processors of pictures and recordings whose files are not there: with the defaults of the class
that transformers chooses by the model's config."""

from __future__ import annotations

import inspect
import os
from types import ModuleType
from typing import Any

from memfit.trace import failures
from memfit.trace.imports import Change, Patch
from memfit.trace.refuse import Watcher

KINDS = {  # module of transformers: the class that reads a file, and the method
    "image_processing_base": ("ImageProcessingMixin", "get_image_processor_dict"),
    "feature_extraction_utils": ("FeatureExtractionMixin", "get_feature_extractor_dict"),
    "video_processing_utils": ("BaseVideoProcessor", "get_video_processor_dict"),
}


def size_of(cls: Any, name: Any) -> dict[str, Any]:
    """The size of pictures that the model's config names, where the class has one for all, crops
    them to one, or cuts them into tiles of one size, four along a side at most."""
    import transformers

    faster = getattr(transformers, f"{cls.__name__}Fast", None)  # its defaults are attributes
    known = getattr(cls, "size", None) or getattr(faster, "size", None)
    tiles = getattr(cls, "max_image_size", None)
    fixed = isinstance(known, dict) and set(known) == {"height", "width"}
    # Slow classes before transformers 5 say so in their arguments alone
    tiled = "max_image_size" in inspect.signature(cls.__init__).parameters
    cropped = isinstance(known, dict) and [*known] == ["shortest_edge"]
    cropped = cropped and bool(getattr(cls, "crop_size", None)) and bool(cls.do_center_crop)
    if not fixed and not tiled and not cropped and not isinstance(tiles, dict):
        return {}
    config = transformers.AutoConfig.from_pretrained(name)
    size = getattr(getattr(config, "vision_config", config), "image_size", None)
    if not isinstance(size, int):
        return {}
    if fixed:
        patch = getattr(getattr(config, "vision_config", config), "patch_size", 0)
        # Some processors ask the class for the number of patches, which only the file has
        counted = (
            {"image_seq_length": (size // patch) ** 2} if isinstance(patch, int) and patch else {}
        )
        return {"size": {"height": size, "width": size}, **counted}
    if cropped:
        return {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
    return {"size": {"longest_edge": 4 * size}, "max_image_size": {"longest_edge": size}}


PATCHES = {  # arguments of processors that cut pictures, and what the tower's config calls them
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}


def patches_of(cls: Any, name: Any) -> dict[str, int]:
    """How the model's config cuts pictures, where the class does so itself: Qwen3-VL has the
    processor of Qwen2-VL, whose patches are smaller."""
    import transformers

    taken = {*dir(cls), *inspect.signature(cls.__init__).parameters}
    if not {"patch_size", "merge_size"} <= taken:
        return {}
    config = transformers.AutoConfig.from_pretrained(name)
    tower = getattr(config, "vision_config", None)
    found = {key: getattr(tower, own, None) for key, own in PATCHES.items()}
    return {key: one for key, one in found.items() if isinstance(one, int)}


def ignoring(cls: Any) -> dict[str, Any]:
    """The number of pixels without a class, which published files of these processors have, and
    without which they do not take classes that begin with the background."""
    return {"ignore_index": 255} if cls.__name__.startswith(UNIVERSAL) else {}


UNIVERSAL = ("MaskFormer", "Mask2Former", "OneFormer")


def changes(recorder: Watcher) -> dict[str, Change]:
    def falling_back(name: str, method: str) -> Change:
        def change(module: ModuleType) -> list[Patch]:
            kind = getattr(module, name)
            true = getattr(kind, method).__func__

            def settings(cls: Any, name: Any, **given: Any) -> Any:
                try:
                    return true(cls, name, **given)
                except Exception as bad:
                    if failures.missing_file(bad) is None or os.path.exists(name):
                        raise
                    recorder.note(
                        f"processor {name}",
                        f"the processor of `{name}` was not found: its class's defaults are used",
                    )
                    made = {**size_of(cls, name), **patches_of(cls, name), **ignoring(cls)}
                    return made, given

            return [(kind, method, classmethod(settings))]  # type: ignore[arg-type]

        return change

    return {f"transformers.{module}": falling_back(*names) for module, names in KINDS.items()}


__all__ = ["changes"]
