"""Configs of models that a script loads by name, where neither the catalog nor a cache has them."""

from __future__ import annotations

import functools
import importlib
import importlib.resources
import inspect
import tomllib
import typing
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from memfit.trace import failures
from memfit.trace.imports import Change, Patch
from memfit.trace.refuse import Watcher


@functools.cache
def table() -> dict[str, Any]:
    text = importlib.resources.files(__package__).joinpath("public_configs.toml").read_text("utf-8")
    return tomllib.loads(text)


def find(name: str, part: str = "") -> dict[str, Any] | None:
    """The config of a model, or of one part of a pipeline."""
    known: dict[str, Any] | None = table()["models"].get(name.lower())
    if known is not None or not part:
        return known
    for word, parts in table()["pipelines"].items():
        if word in name.lower() and part in parts:
            found: dict[str, Any] = parts[part]
            return found
    return None


def note(recorder: Watcher, name: str) -> None:
    message = f"the config of `{name}` was not found: the published sizes are assumed"
    recorder.note(f"config {name}", message)


# Classes of diffusers that scripts load without naming a part.
PARTS = {"UNet2DConditionModel": "unet", "AutoencoderKL": "vae"}


def changes(recorder: Watcher) -> dict[str, Change]:
    """For diffusers' models and schedulers."""

    def made(cls: Any, name: str, part: str, given: dict[str, Any]) -> Any:
        config = find(name, part or PARTS.get(cls.__name__, ""))
        if config is None:
            return None
        note(recorder, name)
        taken = inspect.signature(cls.__init__).parameters
        model = cls(**{key: value for key, value in config.items() if key in taken})
        kind = given.get("torch_dtype") or given.get("dtype")
        if kind is not None and hasattr(model, "to"):
            model = model.to(kind)
        return model.eval() if hasattr(model, "eval") else model

    def falling_back(owner: Any) -> list[Patch]:
        true = owner.from_pretrained.__func__

        def from_pretrained(cls: Any, *args: Any, **given: Any) -> Any:
            name, *args = args or (given.pop("pretrained_model_name_or_path", None),)  # type: ignore[assignment]
            try:
                return true(cls, name, *args, **given)
            except Exception as bad:
                found = None
                if failures.missing_file(bad) is not None:
                    found = made(cls, str(name), str(given.get("subfolder") or ""), given)
                if found is None:
                    raise
                return found

        return [(owner, "from_pretrained", classmethod(from_pretrained))]

    def schedulers(module: ModuleType) -> list[Patch]:
        return falling_back(module.SchedulerMixin)

    def whole(module: ModuleType) -> list[Patch]:
        """A pipeline by its name: its class's parts, each as a script loads it by itself."""
        true = module.DiffusionPipeline.from_pretrained.__func__

        def from_pretrained(cls: Any, name: Any, *args: Any, **given: Any) -> Any:
            try:
                return true(cls, name, *args, **given)
            except Exception as bad:
                kind = pipeline_class(cls, str(name))
                if kind is None or failures.missing_file(bad) is None:
                    raise
                return kind(**dict(pipeline_parts(kind, name, given)))

        return [(module.DiffusionPipeline, "from_pretrained", classmethod(from_pretrained))]

    return {
        "diffusers.models.modeling_utils": lambda module: falling_back(module.ModelMixin),
        "diffusers.schedulers.scheduling_utils": schedulers,
        "diffusers.pipelines.pipeline_utils": whole,
    }


def pipeline_class(cls: Any, name: str) -> Any:
    """The class that a pipeline's name stands for, where the script names none of its own."""
    if cls.__name__ not in GENERAL:
        return cls
    known = next((one for word, one in PIPELINES.items() if word in name.lower()), "")
    return getattr(importlib.import_module("diffusers"), known) if known else None


def pipeline_parts(kind: Any, name: Any, given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a pipeline is made of: parts that are given, and the others by their classes."""
    hints = typing.get_type_hints(kind.__init__)
    types_ = {"torch_dtype": given["torch_dtype"]} if given.get("torch_dtype") else {}
    for part, one in inspect.signature(kind.__init__).parameters.items():
        if part == "self":
            continue
        if part in given or one.default is not inspect.Parameter.empty:
            value = given.get(part, one.default)
        elif part in OPTIONAL:
            value = None
        else:
            options = [one for one in typing.get_args(hints[part]) if isinstance(one, type)]
            made: Any = options[0] if options else hints[part]
            if not hasattr(made, "from_pretrained"):  # an enumeration of schedulers
                made = importlib.import_module("diffusers").DDIMScheduler
            loaded = types_ if hasattr(made, "forward") else {}
            value = made.from_pretrained(name, subfolder=part, **loaded)
        yield part, value


GENERAL = ("DiffusionPipeline", "AutoPipelineForText2Image")
PIPELINES = {
    "xl": "StableDiffusionXLPipeline",
    "flux": "FluxPipeline",
    "stable-diffusion-v1": "StableDiffusionPipeline",
    "stable-diffusion-2": "StableDiffusionPipeline",
}
OPTIONAL = ("safety_checker", "feature_extractor", "image_encoder")


__all__ = ["changes", "find", "note"]
