"""What a type's model without a head has, beside its classes with one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

import torch
from memfit.model.families._headless import NONE, POOLER, USUAL
from memfit.trace import classes
from memfit.trace.program import configuration

if TYPE_CHECKING:
    from memfit.trace.new_family import Subject


def of_bare(subject: Subject) -> dict[str, str]:
    """The head whose class has the weights of the model without a head, where it is not the usual
    one, and the pooler that no class with a head has."""
    if subject.stacks:
        return {}
    config = configuration(subject.config(), None)
    bare = classes.builder(NONE, config)
    if bare is None:
        return {"bare": NONE}
    real = named_weights(bare, config, "")
    heads = sorted(subject.before, key=lambda head: head != USUAL)
    for head in heads:
        cls = getattr(transformers, subject.before[head].run.cls)
        own = named_weights(cls, config, f"{cls.base_model_prefix}.")
        if own == real:
            return {} if head == heads[0] else {"bare": head}
        if real - own == {f"{POOLER}.weight", f"{POOLER}.bias"} and head == heads[0]:
            return {"pooler": POOLER}
    return {"bare": NONE}


def named_weights(cls: Any, config: Any, prefix: str) -> set[str]:
    """The parameters of a class below a prefix, without it."""
    with torch.device("meta"):
        model = cls.from_config(config) if hasattr(cls, "from_config") else cls(config)
    names = [name for name, _ in model.named_parameters()]
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


__all__ = ["of_bare"]
