"""The defaults of a trainer where several methods are compared: what a plan leaves open, and what
it takes from the trainer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memfit.defaults import assumed_for_methods, without_ligers_loss

if TYPE_CHECKING:
    from memfit.hardware import Cluster
    from memfit.model.model import Model

# What a plan tries where a trainer is assumed: its own switches. A selective policy is code, and
# torch's other AdamW is slower and larger.
TRIED = {"checkpointing": ("none", "full"), "optimizer": ("adamw_fused", "adamw_8bit")}
FIRST = {"optimizer": ("adamw_fused",)}  # of these, what is tried first
FIXED = ("framework", "precision")  # options that a plan tries only where no trainer is assumed


def with_defaults(
    named: Mapping[str, Any],
    axes: dict[str, tuple[Any, ...]],
    model: Model | None,
    cluster: Cluster | None,
    use: str,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]:
    """`named` with the trainer's defaults, these alone, and those of each method. `axes` loses the
    values that they rule out."""
    from memfit.plan.space import AXES

    half = "bf16" if cluster is None else cluster.gpu.half
    config = {} if model is None else model.config
    shared, each = trainer_options(named, axes, (config, layouts_named(use), half))
    if {**shared, **named}.get("framework") == "trl":
        named = without_ligers_loss(dict(named), "trl")
        axes["loss"] = axes["loss"] if "loss" in named else AXES["loss"]
    usual = {name: value for name, value in shared.items() if name != "batch"}
    return {**usual, **named}, shared, each


def trainer_options(
    named: Mapping[str, Any],
    axes: dict[str, tuple[Any, ...]],
    question: tuple[Mapping[str, Any], frozenset[str], str],
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The trainer's defaults that nobody named and no axis tries, and those of each method. `axes`
    loses the values that they rule out. `question`: as `assumed_for_methods` takes it."""
    from memfit.plan.space import AXES

    one = {name: value for name, value in named.items() if name not in axes or len(axes[name]) == 1}
    if "framework" in named and "framework" not in one:
        return {}, {}
    shared, each = assumed_for_methods(one, axes["method"], question)
    if "framework" not in {**shared, **one}:
        return {}, {}
    for name in FIXED:
        values = [{**shared, **usual}.get(name) for usual in each.values()]
        if name in axes and name not in named and None not in values:
            axes[name] = tuple(dict.fromkeys(values))
    for name, some in TRIED.items():
        if name not in named and axes.get(name) == AXES[name]:
            axes[name] = some
    tried = [name for name in axes if name not in FIXED]
    return (
        {name: value for name, value in shared.items() if name not in tried},
        {
            method: {name: value for name, value in usual.items() if name not in tried}
            for method, usual in each.items()
        },
    )


def layouts_named(use: str) -> frozenset[str]:
    return frozenset(re.split(r"[=,]", one)[0] for one in use.split())


__all__ = ["FIRST", "with_defaults"]
