"""Writes down the forward passes of a real `generate` call, each with the cache that it reads and
the cache that it leaves: the prompt's pass first, then one for every further token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from memfit.job import Job
from memfit.model.families._captured import PAST
from memfit.trace import inputs, program, serve, steps
from memfit.trace.capture import (
    Call,
    Ref,
    Run,
    Writer,
    collapsed,
    described_inputs,
    described_weights,
    in_order,
)

TOKENS = 4  # the prompt's pass, and three for one token each


def passes_of(config: Mapping[str, Any], job: Job) -> list[Run]:
    """Every pass of `generate` for the class that transformers has for `config`."""
    found: list[Run] = []

    def perform(writer: Any, model: Any, job: Job, options: Any, plan: inputs.Plan) -> None:
        with program.module_stack(writer), collapsed(writer), writer:
            model = steps.brought(writer, model, job, options.strategy, lambda one, on: one)
            writer.names = {id(module): name for name, module in model.named_modules()}
            described_weights(writer, model)
            model.eval()
            writer.serving = True
            prompt = inputs.prompt(writer, model, job, plan, job.batch)
            watch = Watch(writer, found)
            model.register_forward_pre_hook(watch.begins, with_kwargs=True)
            model.register_forward_hook(watch.ends, with_kwargs=True)
            settings = serve.settings_of(model, job)
            with in_order(model):
                model.generate(**prompt, max_new_tokens=job.new_tokens, **settings)

    program.run(config, job, program.Options(recorder=Writer, perform=perform))
    return found


class Watch:
    """Begins a `Run` where the model is called, and ends it where it has returned."""

    def __init__(self, writer: Writer, found: list[Run]) -> None:
        self.writer, self.found, self.first = writer, found, writer.run

    def begins(self, module: Any, args: Any, given: Mapping[str, Any]) -> None:
        first, writer = self.first, self.writer
        writer.run = Run(
            names=first.names,
            weights=first.weights,
            head=first.head,
            head_block=first.head_block,
            cls=first.cls,
            file=first.file,
        )
        tensors = {name: one for name, one in given.items() if isinstance(one, torch.Tensor)}
        described_inputs(writer, tensors)
        for name, ref in cached(writer, given):
            writer.run.given[ref.block] = name
        writer.writing = True

    def ends(self, module: Any, args: Any, given: Mapping[str, Any], outputs: Any) -> None:
        self.writer.writing = False
        self.writer.run.kept = dict(cached(self.writer, given))
        self.found.append(self.writer.run)


def alike(one: Run, other: Run) -> bool:
    """Whether two passes call the same operations in the same modules."""
    first, second = ([call for call in run.log if isinstance(call, Call)] for run in (one, other))
    return [(call.name, call.where) for call in first] == [
        (call.name, call.where) for call in second
    ]


def cached(writer: Writer, given: Mapping[str, Any]) -> Iterator[tuple[str, Ref]]:
    """The tensors of a cache, as `past.3.keys` of the fourth layer."""
    cache = given.get("past_key_values", given.get("cache_params"))
    for number, layer in enumerate(getattr(cache, "layers", ())):
        for name, value in vars(layer).items():
            several = value if isinstance(value, dict) else {"": value}
            for place, one in several.items():
                ref = writer.ref(one) if isinstance(one, torch.Tensor) else None
                if ref is not None:
                    yield f"{PAST}{number}.{name}{place}", ref


__all__ = ["TOKENS", "alike", "passes_of"]
