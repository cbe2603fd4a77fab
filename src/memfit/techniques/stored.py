"""Checkpoints whose weights are stored quantized: what the library does with them, and what it
refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from memfit.constants import counted
from memfit.errors import Problem
from memfit.model.quantized import bitsandbytes_options, method
from memfit.program import Program
from memfit.techniques.base import Technique

PACKED_GGUF: Annotated[
    tuple[int, int],
    counted(
        "the first version of transformers that leaves a GGUF's blocks as they are",
        "transformers 5.17 quantizers/quantizer_gguf.py",
    ),
] = (5, 17)
WHERE = "config.quantization_config"


def check(program: Program) -> Iterator[Problem]:
    yield from of_bitsandbytes(program)
    job, name = program.job, "gguf" if program.model.stored else method(program.model.config)
    if not name:
        return
    if job.framework == "megatron" and name == "fp8" and job.training:
        message = "Megatron trains from its own 16-bit checkpoint"
        yield Problem(
            message=message, where=WHERE, level="note", hint="the conversion is not counted"
        )
    elif not job.hugging:
        yield Problem(
            message=f"not supported yet: weights quantized by {name} with {job.framework}",
            where="job.framework",
            hint="use `--framework transformers`",
        )
    if job.quantization != "none":
        message = (
            f"the weights are already quantized by {name}, and transformers cannot "
            "quantize them again"
        )
        yield Problem(
            message=message,
            where="job.quant",
            hint="remove `--quant`, use `--method lora`, or name the 16-bit checkpoint",
        )
    elif name in ("gptq", "awq") and job.training and not job.adapters:
        message = f"weights quantized by {name} cannot be trained"
        yield Problem(
            message=message,
            where="job.method",
            hint="use `--method lora`, or name the 16-bit checkpoint",
        )
    elif name in ("modelopt", "compressed-tensors"):
        yield from foreign(program, name)
    elif name == "gguf":
        yield gguf(program)


def of_bitsandbytes(program: Program) -> Iterator[Problem]:
    """A checkpoint of bitsandbytes loads as it was stored (transformers 5.23 quantizers/auto.py
    merge_quantization_configs)."""
    stored = bitsandbytes_options(program.model.config)
    asked = program.job.quantization
    if stored and asked != stored["quant"]:
        other = "16 bits" if asked == "none" else asked
        yield Problem(
            message=f"bitsandbytes stored the weights in {stored['quant']}, not in {other}",
            where="job.quant",
            hint="omit `--quant`, or name the model that they were made from",
        )


def foreign(program: Program, name: str) -> Iterator[Problem]:
    """modelopt is a name that transformers does not know: it would put packed bytes where it wants
    16 bits (transformers 5.23 quantizers/auto.py supports_quant_method). Weights of
    compressed-tensors are unpacked by a package of that name."""
    if program.job.training:
        message = (
            f"transformers has no code for weights stored by {name}, so nothing "
            "can be trained over them"
        )
        yield Problem(message=message, where=WHERE, hint="name the 16-bit checkpoint")
    else:
        message = (
            f"transformers has no code for weights stored by {name}: weights are "
            "counted as stored, the rest as if it had"
        )
        yield Problem(
            message=message,
            where=WHERE,
            level="warning",
            hint="vLLM, SGLang and TensorRT-LLM support it: `--engine vllm`",
        )


def gguf(program: Program) -> Problem:
    job = program.job
    if job.training:
        message = "GGUF weights cannot be trained, so they are dequantized to the `precision`"
        return Problem(
            message=message,
            where="model",
            level="note",
            hint="load the model with `quantization_config=GgufConfig(dequantize=True)`",
        )
    if job.version("transformers") < PACKED_GGUF:
        message = (
            f"transformers before {'.'.join(map(str, PACKED_GGUF))} dequantizes a GGUF file on load"
        )
        return Problem(message=message, where="model", level="note")
    message = (
        "weights count as the file stores them; everything else follows transformers, not llama.cpp"
    )
    return Problem(message=message, where="model", level="note")


def stays(program: Program) -> bool:
    """Do the blocks of a GGUF lie in memory as the file stores them?"""
    job = program.job
    return (
        bool(program.model.stored)
        and not job.training
        and job.version("transformers") >= PACKED_GGUF
    )


TECHNIQUE = Technique(
    name="stored",
    order=40,
    cite=(
        "transformers 5.23 quantizers/auto.py merge_quantization_configs; trainer_utils.py "
        "validate_quantization_for_training"
    ),
    wanted=lambda job: True,
    apply=lambda program: program,
    check=check,
)
