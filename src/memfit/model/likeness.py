"""Estimates by the formulas of another family, with the sizes of the given config (`--like
NAME`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from memfit.errors import InputError, Problem
from memfit.model import catalog, equivalents
from memfit.model.families import Family, build, families
from memfit.model.model import Model
from memfit.registry import nearest

MARK = "formulas of "


def family_named(name: str) -> Family:
    """The family of a `model_type`, or that of a model in the catalog."""
    known = families()
    kind = name.strip()
    if kind not in known and (found := catalog.find(kind)) is not None:
        kind = catalog.entry(found).model_type
    if kind in known:
        return known[kind]
    close = ", ".join(f"`{one}`" for one in nearest(kind, known))
    raise InputError.one(
        f"unknown family `{name[:60]}`",
        where="like",
        hint=f"did you mean {close}?"
        if close
        else "give a model_type, like `llama` or `qwen3_moe`",
    )


def build_like(like: str, config: Mapping[str, Any], *, name: str = "", origin: str = "") -> Model:
    """The model of `config` as if it were of the family `like`; its text part, where it has one."""
    family = family_named(like)
    own = str(config.get("model_type", ""))
    text = config.get("text_config")
    sizes = {**config, **text} if isinstance(text, Mapping) else dict(config)
    made = build({**sizes, "model_type": family.model_types[0]}, name=name or own, origin=origin)
    return replace(made, origin=f"{origin}, {MARK}`{family.name}`".removeprefix(", "))


def remarks(like: str, model: Model, total: int | None) -> Iterator[Problem]:
    """That the formulas are another family's, and how far its parameter count is off; or that they
    follow a description."""
    if not like:
        yield from equivalents.remarks(model.config)
        return
    counted = ""
    if total:
        counted = f"; they count {model.parameters / total - 1:+.1%} parameters"
    yield Problem(
        message=f"`{model.name}` is estimated by the formulas of `{model.family}`{counted}",
        where="like",
        hint="its own layers may use more or less memory; a trace runs the real code",
        level="warning",
    )


__all__ = ["build_like", "family_named", "remarks"]
