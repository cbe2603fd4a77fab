"""Follows a program that nobody wrote for us: its phases and steps, the names of its modules, which
part of memory its tensors are."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import torch
from memfit.trace import cuda, versions
from memfit.trace.label import settle
from memfit.trace.ops import collect
from memfit.trace.paths import plain
from memfit.trace.recorder import Block, Recorder
from memfit.trace.repeats import Repeats
from memfit.trace.steps import own, paths_of, states

PATIENCE = 3
MANY = 64  # backward passes after which a program without an optimizer of torch has shown enough


class Stopped(BaseException):
    """The program has shown enough steps. Not an `Exception`: programs catch those."""


class Follower:
    """Tells a recorder what the program does. `steps`: optimizer steps after which it is stopped, 0
    for never."""

    def __init__(
        self, recorder: Recorder, steps: int, leave: Callable[[], None] = lambda: None
    ) -> None:
        self.recorder, self.wanted, self.leave = recorder, steps, leave
        self.stops = 0
        self.roots: dict[int, weakref.ref[torch.nn.Module]] = {}
        self.counts: dict[int, int] = {}  # steps of each optimizer
        self.backwards = self.depth = 0
        self.end: int | None = None  # events up to here belong to the answer
        self.paths: dict[int, str] = {}
        self.vocabularies: set[int] = set()
        self.parameters = (0, 0)  # values in all modules, and those that train
        self.ranks: Any = None  # which process of how many the program is
        self.repeats = Repeats(recorder)

    @property
    def steps(self) -> int:
        return max(self.counts.values(), default=0)

    # -- modules
    # ----------------------------------------------------------------------------------------------
    def entering(self, module: torch.nn.Module, values: Iterable[Any]) -> None:
        """A call from outside of any module: its names are known from here on, and a new phase may
        begin."""
        recorder = self.recorder
        if self.depth:
            return  # a recomputation
        if id(module) not in recorder.names:
            self.adopt(module)
        inputs: list[torch.Tensor] = []
        collect(tuple(values), inputs)
        for one in inputs:
            block = recorder.owned(one)
            if block is not None and block.part is None and not one.requires_grad:
                block.part = "inputs"
        if torch.is_grad_enabled() and module.training:
            if recorder.phase != "forward" and any(
                one.requires_grad for one in module.parameters()
            ):
                recorder.mark("forward", step=self.steps)
        else:
            self.without_gradients()

    def without_gradients(self) -> None:
        recorder = self.recorder
        if generating():
            recorder.serving = True  # `enter` marks prefill and decode itself
        else:
            recorder.serving = False
            if recorder.phase != "evaluate":
                recorder.mark("evaluate", step=self.steps)

    def adopt(self, module: torch.nn.Module) -> None:
        """Learn a root's names; what it holds are weights and buffers."""
        known = dict(module.named_modules())
        names = {id(one): plain(path) for path, one in known.items()}
        self.recorder.names.update(names)

        def gone(_: Any) -> None:
            self.roots.pop(id_of_root, None)
            for one in names:
                self.recorder.names.pop(one, None)

        id_of_root = id(module)
        self.roots[id_of_root] = weakref.ref(module, gone)
        self.paths.update(paths_of(module))
        for path, one in known.items():
            for tensor in one.parameters(recurse=False):
                self.hold(tensor, "weights", path)
            for tensor in one.buffers(recurse=False):
                self.hold(tensor, "buffers", path)
        with contextlib.suppress(AttributeError):
            self.vocabularies.add(int(versions.text_config(module.config).vocab_size))

    def hold(self, tensor: torch.Tensor, part: Any, path: str, *also: str) -> None:
        block = self.recorder.owned(tensor)
        if block is not None and block.part in (None, "activations", "inputs", *also):
            block.part, block.where = part, plain(path) or block.where

    def inferred(self) -> bool:
        """Whether a program without a backward pass ran a model on its GPU."""
        phases = ("evaluate", "prefill", "decode")
        blocks = (one for one in self.recorder.events if isinstance(one, Block))
        if self.backwards or not any(one.phase in phases for one in blocks):
            return False
        self.count()
        self.parameters = (self.parameters[0], 0)
        message = "the script does not train: the peak is that of the inference that it runs"
        self.recorder.note("inference", message)
        return True

    # -- backward and step
    # -----------------------------------------------------------------------------------------
    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `torch.autograd.backward` and `grad`; inside a recomputation they are called
        again."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.depth == 0:
                self.recorder.mark("backward", step=self.steps)
            self.depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.after_backward()

        return run

    def after_backward(self) -> None:
        self.recorder.rest()
        self.backwards += 1
        self.count()
        parameters = [
            one
            for ref in self.roots.values()
            for module in (ref(),)
            if module is not None
            for one in module.parameters()
        ]
        own(self.recorder, "gradients", (one.grad for one in parameters if one.grad is not None))
        self.recorder.mark("prepare", step=self.steps)
        if not self.counts and self.backwards >= MANY and self.wanted:
            self.stop()

    def stepping(self, *_: Any) -> None:
        if self.recorder.phase != "step":
            self.recorder.mark("step", step=self.steps)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        trained = [one for group in optimizer.param_groups for one in group["params"]]
        for one in trained:
            # FSDP1 made its shards beside what it gathers (torch 2.13 fsdp/_flat_param.py)
            self.hold(one, "weights", "", "communication", "gradients")
        self.count(trained)
        own(self.recorder, "gradients", (one.grad for one in trained if one.grad is not None))
        self.stepping()

    def count(self, trained: Iterable[torch.Tensor] = ()) -> None:
        """Once: the values of all modules that were called, and of what is trained beside them."""
        if not self.parameters[0]:
            modules = [module for ref in self.roots.values() if (module := ref()) is not None]
            known = {id(one): one for module in modules for one in module.parameters()} | {
                id(one): one for one in trained
            }
            self.parameters = (
                sum(map(values, known.values())),
                sum(values(one) for one in known.values() if one.requires_grad),
            )

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        states(self.recorder, optimizer, self.paths)
        if self.end is None:
            self.counts[id(optimizer)] = self.counts.get(id(optimizer), 0) + 1
        self.recorder.mark("prepare", step=self.steps)
        if self.wanted and self.steps >= self.wanted:
            self.stop()

    def stop(self) -> None:
        """Also when the program went on all the same, having caught even this; at last without
        asking it."""
        self.end = len(self.recorder.events) if self.end is None else self.end
        self.stops += 1
        if self.stops > PATIENCE:
            self.leave()
        raise Stopped

    # -- all of it
    # ----------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        original = torch.nn.Module.__call__
        recorder = self.recorder

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not recorder.modules and not isinstance(module, torch.nn.modules.loss._Loss):
                self.entering(module, (*args, *kwargs.values()))
            root = not recorder.modules and not torch.is_grad_enabled()
            recorder.enter(module)
            try:
                if root and not self.depth:
                    return self.repeats.run(module, original, args, kwargs)
                return original(module, *args, **kwargs)
            finally:
                recorder.leave()

        def marked(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self.stepping()
                return function(*args, **kwargs)

            return run

        clipping = torch.nn.utils.clip_grad
        patches: list[tuple[Any, str, Any]] = [
            (torch.nn.Module, "__call__", call),
            (torch.autograd, "backward", self.backward(torch.autograd.backward)),
            (torch.autograd, "grad", self.backward(torch.autograd.grad)),
            (torch.amp.GradScaler, "unscale_", marked(torch.amp.GradScaler.unscale_)),
            *(
                (owner, name, marked(getattr(clipping, name)))
                for owner in (clipping, torch.nn.utils)
                for name in ("clip_grad_norm_", "clip_grad_value_")
            ),
        ]
        hooks = [
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]
        try:
            with cuda.patched(patches):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def settled(self) -> None:
        """Every block gets its part."""
        for vocabulary in self.vocabularies:
            settle(self.recorder, vocabulary)
        settle(self.recorder, -1)


def values(parameter: Any) -> int:
    """A packed weight stands for more values than it has bytes."""
    state = getattr(parameter, "quant_state", None)
    return math.prod(state.shape) if state is not None else int(parameter.numel())


def generating() -> bool:
    """Whether the call comes from transformers' `generate`."""
    frame: Any = sys._getframe(1)
    for _ in range(24):
        if frame is None:
            return False
        if frame.f_code.co_name == "generate" and "transformers" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


__all__ = ["Follower", "Stopped"]
