"""Steps of transformers' Trainer that add up many batches: those after the third allocate like it,
so the largest are run alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from memfit.trace.imports import Patch
from memfit.trace.refuse import Watcher

ENOUGH = 3  # the first finds no gradients, the second adds to them, the last shares them


def trainer(module: ModuleType, recorder: Watcher) -> list[Patch]:
    """For `transformers.trainer`, from 4.46 on, where a step's batches are read before it."""
    kind = module.Trainer
    collect = getattr(kind, "get_batch_samples", None)
    if collect is None or not hasattr(kind, "_inner_training_loop"):
        return []
    loop = kind._inner_training_loop
    steps: dict[int, Step] = {}  # of trainers that are training

    @functools.wraps(loop)
    def fewer(self: Any, *args: Any, **given: Any) -> Any:
        number = self.args.gradient_accumulation_steps
        whole = type(self).get_batch_samples is not few or shaped_by(self)
        if number <= ENOUGH or whole:
            return loop(self, *args, **given)
        recorder.note(
            "micro-batches",
            f"of the {number} batches of a step the first and the {ENOUGH - 1} largest others "
            "are run: the rest allocate less, or the same",
        )
        steps[id(self)] = Step(number)
        self.args.gradient_accumulation_steps = ENOUGH
        try:
            return loop(self, *args, **given)
        finally:
            self.args.gradient_accumulation_steps = number
            del steps[id(self)]

    @functools.wraps(collect)
    def few(self: Any, batches: Any, number: int, *args: Any) -> Any:
        step = steps.get(id(self))
        if step is None:
            return collect(self, batches, number, *args)
        step.batches, *rest = collect(self, batches, step.number, *args)
        return (largest(step.batches), *rest)

    return [(kind, "_inner_training_loop", fewer), (kind, "get_batch_samples", few)]


@dataclass
class Step:
    """How many batches a step adds up, and all of them: they are on the GPU while it runs."""

    number: int
    batches: list[Any] = field(default_factory=list)


def shaped_by(trainer: Any) -> bool:
    """Whether the number of batches decides what a step does: DeepSpeed's engine counts them
    itself, and TRL generates for so many at once."""
    return bool(
        getattr(trainer, "is_deepspeed_enabled", False)
        or hasattr(trainer.args, "steps_per_generation")
    )


def largest(batches: list[Any]) -> list[Any]:
    """The first, and of the others the largest, in their order."""
    others = sorted(range(1, len(batches)), key=lambda place: -size(batches[place]))
    return [batches[place] for place in sorted([0, *others[: ENOUGH - 1]]) if place < len(batches)]


def size(batch: Any) -> int:
    """How many numbers a batch has."""
    if isinstance(batch, torch.Tensor):
        return batch.numel()
    if isinstance(batch, (list, tuple)):
        return sum(map(size, batch))
    return sum(map(size, batch.values())) if hasattr(batch, "values") else 0


__all__ = ["trainer"]
