"""GPUs, machines and models among the words of a command."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from memfit.errors import InputError, Problem
from memfit.words.read import gather

if TYPE_CHECKING:  # each function imports what it needs, and no more
    from memfit.hardware import Cluster

AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(?:g|gb|gib)", re.IGNORECASE)  # of memory, not a GPU


def one_model(words: tuple[str, ...]) -> str:
    """The one argument that is not an option."""
    if len(words) == 1:
        return words[0]
    listed = ", ".join(f"`{word[:40]}`" for word in words[:4])
    message = f"one model at a time, not {len(words)}: {listed}" if words else "no model is given"
    if names_gpu(words):
        gpu = f"--gpu {words[1]}"
        fix = (words[1], gpu)
        raise InputError(
            Problem(message=message, where="model", hint=f"did you mean `{gpu}`?", fix=fix)
        )
    if len(words) > 2 and is_gpu(words[-1]):
        hint = f"did you mean `memfit {words[0]} --gpu {words[-1]}`?"
        raise InputError.one(message, where="model", hint=hint)
    raise InputError.one(
        message,
        where="model",
        hint="give a hub id, a path, a name from `memfit models`, or a job file (*.yaml)",
    )


def names_gpu(words: tuple[str, ...]) -> bool:
    """Whether the second of two words is a GPU, or a machine with some."""
    return len(words) == 2 and is_gpu(words[1])


def is_gpu(word: str) -> bool:
    """Whether a word names a GPU, or a machine with some; a number below 100 does not."""
    if word.isdecimal() and len(word) < 3:
        return False
    try:
        return cluster_of(word, "") is not None
    except InputError:
        return False


def cluster_of(gpu: str, memory: str) -> Cluster | None:
    """Where it runs; `memory` overrides what the record of `gpu` says."""
    if not gpu and not memory:
        return None
    from memfit.hardware import Cluster, auto_gpu, custom_gpu, parse_cluster
    from memfit.units import parse_bytes

    problems: list[Problem] = []
    if amount := AMOUNT.fullmatch(gpu.strip()):  # `--gpu 24GB`: as cards are labelled
        gpu, memory = "", memory or f"{amount[1]}GiB"
    size = gather(problems, lambda: 0, lambda: parse_bytes(memory, where="memory") if memory else 0)
    found: Cluster | None = None
    if gpu:
        nothing = gather(
            problems,
            lambda: None,
            lambda: Cluster(gpu=auto_gpu()) if gpu == "auto" else parse_cluster(gpu),
        )
        found = nothing
    if problems:
        raise InputError(*problems)
    if found is None:
        return Cluster(gpu=custom_gpu(size))
    if not size:
        return found
    told = dataclasses.replace(
        found.gpu,
        memory=size,
        memory_range=(size, size),
        held=0,
        status={**found.gpu.status, "memory": "given"},
        cites={**found.gpu.cites, "memory": "given by the user"},
    )
    return dataclasses.replace(found, gpu=told)


def gpu_notes(gpu: str) -> tuple[Problem, ...]:
    """What was assumed about the GPU as typed, as notes for the answer."""
    if not gpu or gpu == "auto":
        return ()
    from memfit.hardware import assumptions

    return assumptions(gpu)
