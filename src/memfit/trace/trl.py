"""TRL's own heads, which take the place of transformers' loss: SFTTrainer's code from logits to
loss, with Triton's kernels left out.

Since 1.15 `trl.trainer.utils.add_fused_lm_head` (over kernels/chunked_logprob.py), before it
`trainer/sft_trainer.py` `_patch_chunked_ce_lm_head`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from memfit.errors import InputError, Problem
from memfit.job import Job
from memfit.libraries.trl.check import head_of
from memfit.trace import cuda
from memfit.trace.liger import Kernel, Module, without_triton
from memfit.trace.standins import Int8Params, Params4bit

HEADS = ("causal-lm", "image-text")  # what SFTTrainer trains


def settled(job: Job) -> Job:
    """With the version that is installed, unless the job names one."""
    if (
        job.framework != "trl"
        or "trl=" in job.versions.replace(" ", "")
        or importlib.util.find_spec("trl") is None
    ):
        return job
    found = ".".join(importlib.metadata.version("trl").split(".")[:2])
    return job.replace(versions=f"{job.versions},trl={found}".lstrip(","))


def load(job: Job) -> None:
    """Its packages must still see the true machine."""
    kind = head_of(job)
    if kind == "fused":
        library(
            "trl.kernels.chunked_logprob"
        )  # first: 1.15 goes without it where it cannot be imported
    if job.training and job.activation_offload == "streams":
        library("trl.models.activation_offloading")
    if kind != "plain":
        library("trl.trainer.utils" if kind == "fused" else "trl.trainer.sft_trainer")


def missing(job: Job) -> Iterator[Problem]:
    if (
        head_of(job) != "plain" or (job.training and job.activation_offload == "streams")
    ) and importlib.util.find_spec("trl") is None:
        message = "a trace of TRL's head or hooks needs `trl`, which is not installed"
        yield Problem(
            message=message,
            where="job.framework",
            hint=("run `pip install trl`, set an older TRL in `versions`, or use `--by formula`"),
        )


def headed(model: Any, job: Job, kind: str) -> Any:
    """The model with its head, as SFTTrainer gives it one behind PEFT."""
    head = head_of(job)
    if head == "plain" or kind not in HEADS:
        return model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if head == "fused" and base.base_model is base:
        raise InputError.one(
            f"TRL's own head fails with `{type(base).__name__}`, whose `base_model` is itself",
            where="job.framework",
            hint="use `--framework transformers`, or an older TRL in `--versions`",
        )
    last = base.get_output_embeddings()
    if hasattr(last, "lora_A"):
        raise InputError.one(
            "TRL does not support adapters on the head", where="job.targets", hint="leave it out"
        )
    whole = getattr(last.weight, "ds_shape", last.weight.shape)  # ZeRO-3's parts have one dimension
    if len(whole) != 2 or isinstance(last.weight, (Params4bit, Int8Params)):
        raise InputError.one(
            "TRL's loss needs an unquantized head",
            where="job.quant_skip",
            hint="add the head",
        )
    if head == "fused":
        library("trl.trainer.utils").add_fused_lm_head(
            base, outputs=("log_probs", "entropy", "is_top1")
        )
    else:
        trainer = library("trl.trainer.sft_trainer")
        trainer._patch_chunked_ce_lm_head(base, chunk_size=trainer._CHUNKED_LM_HEAD_CHUNK_SIZE)
    return model


def library(name: str) -> Any:
    """1.15 imports Triton without asking whether it is there."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as bad:
        if bad.name != "triton":
            raise
        with without_triton():
            return importlib.import_module(name)


def called(forward: Callable[..., Any], job: Job, kind: str) -> Callable[..., Any]:
    """A forward whose outputs have the loss that SFTTrainer's `compute_loss` makes of them (trl
    1.16 trainer/sft_trainer.py)."""
    if head_of(job) != "fused" or kind not in HEADS:
        return forward

    def run(**given: Any) -> Any:
        outputs = forward(**given, fused_lm_head=True)
        lost = -outputs.log_probs
        outputs.loss = lost.sum() / outputs.label_mask.sum().clamp(min=1)
        return outputs

    return run


@contextlib.contextmanager
def without_kernels(job: Job) -> Iterator[None]:
    """Inside, Triton's kernels do nothing, and are there on a GPU whatever is installed."""
    if head_of(job) != "fused":
        yield
        return
    module = library("trl.kernels.chunked_logprob")
    changes: list[tuple[Any, str, Any]] = [
        (module, name, Kernel()) for name in ("_forward_kernel", "_backward_kernel")
    ]
    changes += [(module, "triton", Module("triton"))] if not hasattr(module, "triton") else []
    users = [module, library("trl.trainer.utils")]
    changes += [
        (one, "_use_triton", lambda device: device.type == "cuda")
        for one in users
        if hasattr(one, "_use_triton")
    ]
    with cuda.patched(changes):
        yield


__all__ = ["HEADS", "called", "headed", "load", "missing", "settled", "without_kernels"]
