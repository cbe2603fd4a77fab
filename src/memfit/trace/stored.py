"""Checkpoints and job options that the trace does not support and must refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memfit.errors import Problem
from memfit.job import Job
from memfit.model.quantized import method
from memfit.techniques.dequantize import STAYS
from memfit.techniques.stored import PACKED_GGUF


def refusals(config: Mapping[str, Any], job: Job, gpu: Any, device: str) -> Iterator[Problem]:
    """Weights that stay as their checkpoint stores them, whose kernels are another package's; and
    kernels that are put into the model."""
    name = kept(config, job, None if device == "cpu" else getattr(gpu, "sm", None))
    if name and not runs(config, job, device):
        message = f"a trace does not support weights quantized by `{name[:40]}`"
        yield Problem(
            message=message,
            where="config.quantization_config",
            hint="use `--by formula`, or trace the 16-bit checkpoint",
        )
    if job.unsloth:
        yield Problem(
            message="a trace does not support Unsloth's kernels",
            where="job.unsloth",
            hint="use `--by formula`",
        )


def runs(config: Mapping[str, Any], job: Job, device: str) -> bool:
    """Whether the trace has modules for weights that stay as they are stored."""
    from memfit.trace import packed_weights

    trained = not job.training or (job.adapters and packed_weights.trains(config))
    return device != "cpu" and trained and packed_weights.known(config)


def kept(config: Mapping[str, Any], job: Job, capability: tuple[int, int] | None) -> str:
    """The method by which weights are stored and stay so; empty where there is none, or they become
    16 bits."""
    name = method(config)
    opened = unpacked(name, job, capability) or (
        name == "gguf" and (job.training or job.version("transformers") < PACKED_GGUF)
    )
    return "" if opened else name


def unpacked(name: str, job: Job, capability: tuple[int, int] | None) -> bool:
    """Whether weights stored by this method become 16 bits, as `techniques.dequantize` says; a GPU
    of which nothing is known has the kernels."""
    stays = STAYS.get(name)
    if stays is None:
        return False
    trains = job.training and not (job.adapters and job.version("transformers") >= stays.adapts)
    return trains or (capability is not None and capability < stays.least)


__all__ = ["kept", "refusals", "runs"]
