"""What is wrong with a job as a whole: options that do not go together, and those that have no
effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from memfit.errors import Problem
from memfit.optimizers import OPTIMIZERS, REFUSED
from memfit.option_values import unknown

if TYPE_CHECKING:
    from memfit.job import Job

# The versions that the formulas were read from; `versions` names older ones.
NEWEST = {
    "transformers": (5, 23),
    "torch": (2, 13),
    "peft": (0, 21),
    "accelerate": (1, 15),
    "bitsandbytes": (0, 50),
    "flash-attn": (2, 8),
    "liger-kernel": (0, 8),
    "trl": (1, 16),
    "litgpt": (0, 5),
    "torchtune": (0, 6),
    "torchtitan": (0, 3),
}


# Before these there is nothing that the formulas could speak of: Llama came with transformers 4.28,
# and torch 1.13 is the oldest of any published figure; of the others every release is taken.
OLDEST = {"transformers": (4, 28), "torch": (1, 13), "flash-attn": (2, 0)}


VERSION = re.compile(r"\s*([a-z][a-z-]*)\s*=\s*v?(\d{1,4})\.(\d{1,4})[\w.+]*\s*", re.ASCII)


def optimizer_problems(job: Job) -> Iterator[Problem]:
    """A name that nobody knows, or that does not go with the rest."""
    name, where = job.optimizer, "job.optimizer"
    if name in REFUSED:
        yield Problem(message=REFUSED[name], where=where, hint="use `adamw`")
        return
    if name not in OPTIMIZERS:
        yield unknown("optimizer", name, where, tuple(OPTIMIZERS))
        return
    row = OPTIMIZERS[name]
    if job.training and row.adapters and not job.adapters:
        yield Problem(
            message=f"optimizer `{name}` is PEFT's, for adapters",
            where=where,
            hint="use `--method lora` or `qlora`",
        )
    if (
        job.training
        and row.when == "layerwise"
        and isinstance(job.accumulate, int)
        and job.accumulate > 1
    ):
        message = (
            f"optimizer `{name}` steps during the backward pass and cannot accumulate gradients"
        )
        yield Problem(
            message=message,
            where=where,
            hint="use `--accumulate 1`, or the optimizer without `_layerwise`",
        )


def version_problems(text: str) -> Iterator[Problem]:
    seen: set[str] = set()
    for piece in filter(str.strip, text.split(",")):
        found = VERSION.fullmatch(piece)
        if found is not None and found[1] in seen:
            yield Problem(
                message=f"`{found[1]}` is given twice",
                where="job.versions",
                hint="give each library once",
            )
        seen |= {found[1]} if found is not None else set()
        if found is None:
            yield Problem(
                message=f"`{piece.strip()[:60]}` is not a version",
                where="job.versions",
                hint="write it like `transformers=4.51,torch=2.6`",
            )
        elif found[1] not in NEWEST:
            yield unknown("library", found[1], "job.versions", tuple(NEWEST))
        elif (int(found[2]), int(found[3])) < (oldest := OLDEST.get(found[1], (0, 1))):
            least = ".".join(map(str, oldest))
            yield Problem(
                message=f"`{piece.strip()[:60]}` is older than {least}, the oldest supported",
                where="job.versions",
                hint=f"`{found[1]}={least}` or newer",
            )


# Options that count only where the condition holds, and what they are for.
COUNTS: tuple[tuple[tuple[str, ...], Callable[[Job], bool], str], ...] = (
    (
        (
            "accumulate",
            "optimizer",
            "clip",
            "zero_grad",
            "checkpointing",
            "loss",
            "liger",
            "evaluate",
            "longest",
        ),
        lambda job: job.training,
        "training",
    ),
    (
        ("keep_outputs",),
        lambda job: job.training and job.hugging,
        "training loops around transformers' models",
    ),
    (("activation_offload",), lambda job: job.training, "training"),
    (
        ("checkpoint_every",),
        lambda job: job.training and job.checkpointing == "every",
        "`checkpointing` `every`",
    ),
    (
        ("recompute_modules",),
        lambda job: (
            job.training and job.framework == "megatron" and job.checkpointing == "selective"
        ),
        "Megatron's selective recomputation",
    ),
    (
        ("recompute_layers",),
        lambda job: job.training and job.framework == "megatron" and job.checkpointing == "full",
        "Megatron's full recomputation",
    ),
    (
        ("reentrant",),
        lambda job: job.training and job.checkpointing != "none",
        "gradient checkpointing",
    ),
    (
        ("rank", "targets", "dropout", "modules_to_save", "adapter_dtype", "merge"),
        lambda job: job.adapters,
        "methods `lora` and `qlora`",
    ),
    (("target_seq",), lambda job: job.training, "training"),
    (("image_size",), lambda job: job.images > 0, "`images`"),
    (("trainable",), lambda job: job.training and job.method == "freeze", "method `freeze`"),
    (
        ("double_quant", "quant_compute"),
        lambda job: job.quantization in ("nf4", "fp4"),
        "4-bit weights",
    ),
    (("quant_skip",), lambda job: job.quantization != "none", "weights quantized by bitsandbytes"),
    (
        ("prepare_kbit",),
        lambda job: job.adapters and job.quantization != "none",
        "adapters on quantized weights",
    ),
    (("new_tokens", "cache", "logits", "beams"), lambda job: not job.training, "task `inference`"),
    (
        ("cache_tokens",),
        lambda job: not job.training and (job.cache == "static" or job.framework == "litgpt"),
        "a static KV cache",
    ),
    (
        ("cache_bits",),
        lambda job: not job.training and job.cache == "quantized",
        "a quantized KV cache",
    ),
    (("eval_batch",), lambda job: job.training and job.evaluate, "`evaluate`"),
)


def cache_problems(job: Job) -> Iterator[Problem]:
    sizes = (job.cache_tokens, job.seq, job.new_tokens)
    if not all(isinstance(one, int) for one in sizes):
        return  # said elsewhere
    room, needed = job.cache_tokens, job.seq + job.new_tokens - 1
    if 0 < room < needed:
        yield Problem(
            message=f"a KV cache of {room} tokens is too small: this request needs {needed}",
            where="job.cache_tokens",
            hint=f"use at least {needed}, or 0",
        )


def remarks(job: Job) -> Iterator[Problem]:
    """Options that were set and change nothing, and libraries newer than those that were read."""
    for names, counts, purpose in COUNTS:
        for name in names if not counts(job) else ():
            if getattr(job, name) != getattr(type(job), name):
                yield Problem(
                    message=f"`{name}` has no effect here; it applies to {purpose}",
                    where=f"job.{name}",
                    level="note",
                )
    for library, newest in NEWEST.items():
        if job.version(library) > newest:
            told, read = (".".join(map(str, one)) for one in (job.version(library), newest))
            message = (
                f"{library} {told} is newer than {read}, the latest version memfit knows; "
                f"the answer is for {read}"
            )
            yield Problem(message=message, where="job.versions", level="warning")


__all__ = [
    "COUNTS",
    "NEWEST",
    "VERSION",
    "cache_problems",
    "optimizer_problems",
    "remarks",
    "version_problems",
]
