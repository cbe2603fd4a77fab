"""Configs of models that a script loads by name, where neither the catalog nor a cache has them."""

from __future__ import annotations

import functools
import importlib.resources
import inspect
import tomllib
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

    return {
        "diffusers.models.modeling_utils": lambda module: falling_back(module.ModelMixin),
        "diffusers.schedulers.scheduling_utils": schedulers,
    }


__all__ = ["changes", "find", "note"]
