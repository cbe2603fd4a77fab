"""What a serving engine is: its options as data, its command line, and its answer to a question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol

from memfit.errors import Problem
from memfit.hardware import GPU
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.model.source import Source
from memfit.serving.result import ServingAnswer


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of an engine, under the engine's own names. `kind` is text, words (several of
    them), int, float, flag, size (a number such as `8k`) or json; `default` is what the help page
    shows. `means` is what several engines have under names of their own: `context` of a request,
    `users` with a context each, `slots` that share one; GPUs that share each layer (`tensor`), that
    have layers each (`stages`) or a model each (`copies`)."""

    name: str
    flags: tuple[str, ...]
    help: str
    kind: str = "text"
    default: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    silent: bool = False  # read and passed over: it does not change the memory
    names_model: bool = False  # its value is the model, which may also stand alone
    means: str = ""
    supported: bool = True  # else refused: it changes the memory in ways not known yet


def named(flag: str) -> str:
    """The name of the option that a flag spells."""
    return flag.lstrip("-").replace("-", "_")


def plain_options(
    *,
    values: Iterable[str] = (),
    flags: Iterable[str] = (),
    words: Iterable[str] = (),
    refused: Iterable[str] = (),
    refused_flags: Iterable[str] = (),
) -> tuple[Option, ...]:
    """Options that an engine reads and passes over, with a value, without one and with several; and
    those that it refuses, with a value and without one."""
    passed = (("text", values), ("flag", flags), ("words", words))
    return tuple(
        Option(name=named(one), flags=(one,), help="", kind=kind, silent=True)
        for kind, spelled in passed
        for one in spelled
    ) + tuple(
        Option(name=named(one), flags=(one,), help="not supported yet", kind=kind, supported=False)
        for kind, spelled in (("text", refused), ("flag", refused_flags))
        for one in spelled
    )


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model that an engine serves. `model` is None where memfit has no formulas for the family;
    then its config and its published parameter count are all there is."""

    name: str
    config: Mapping[str, Any]
    source: Source | None = None
    model: Model | None = None
    parameters: int | None = None
    origin: str = ""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as an engine sees it: `total` is what the driver says there is, `free` what is free
    when the engine starts (None: derived from the engine's own use)."""

    name: str
    total: int
    free: int | None = None
    gpu: GPU | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, the GPUs, and the engine's options by name. No device: sizes only, no verdict."""

    subject: Subject
    devices: tuple[Device, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""  # of the engine; empty means the newest that memfit knows
    draft: Subject | None = None  # a separate draft model that the options name
    beside: tuple[Subject, ...] = ()  # other models that stay loaded on the same GPU
    draft_left_out: bool = False  # a draft is named that cannot be read, so it is not counted


def silicon_problems(question: Question, title: str) -> Iterator[Problem]:
    """For engines whose use of memory is known under CUDA and ROCm alone."""
    gpu = question.devices[0].gpu if question.devices else None
    if gpu is not None and gpu.vendor == "apple":
        yield Problem(
            message=f"memfit does not know how {title} uses memory on Apple silicon",
            where="gpu",
            hint="`--engine mlx` or `--engine llama.cpp`",
        )


def shared_memory(device: Device, logged: str) -> Problem | None:
    """On a GPU that shares the host's memory, what others take meanwhile looks like the engine's
    own. `logged`: what start-up logs have, more or less than the rules."""
    if device.gpu is None or device.gpu.form != "unified":
        return None
    return Problem(
        level="note",
        message="nothing else is taken to use this GPU's memory, which is the host's; start-up "
        f"logs of a DGX Spark have {logged} for the cache",
        where="gpu",
    )


class ServingEngine(Protocol):
    """An engine.

    `needs_memory`: its sizes depend on the GPU's memory. `shared_flag` says how many GPUs share
    each layer (empty: none do); `online` are the values of `--quantization` that it makes of 16-bit
    weights layer by layer, without holding all of them first, the better one first. `read` takes
    the words of its own command line (`vllm serve MODEL --flag …`) and returns the model and the
    flags; `subject` reads names that only this engine understands, and is None for all others.
    `row_options`, `row_figures` and `row_subject` read published rows: the options, the printed
    figures under the answer's names, and a model that is described, not named.
    """

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def options(self) -> tuple[Option, ...]: ...
    @property
    def needs_memory(self) -> bool: ...
    @property
    def shared_flag(self) -> str: ...
    def read(self, words: Sequence[str]) -> tuple[str, tuple[str, ...]]: ...
    def subject(self, name: str, offline: bool = False) -> Subject | None: ...
    def online(self, question: Question) -> tuple[str, ...]: ...
    def row_options(self, row: Mapping[str, Any]) -> dict[str, Any]: ...
    def row_figures(self, figures: Mapping[str, Any]) -> dict[str, float]: ...
    def row_subject(self, name: str, options: Mapping[str, Any]) -> Subject | None: ...
    def answer(self, question: Question) -> ServingAnswer: ...
