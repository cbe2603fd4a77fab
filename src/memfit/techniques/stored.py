"""Checkpoints whose weights are stored quantized: what the library does with them, and what it
refuses."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.model.quantized import method
from memfit.program import Program
from memfit.techniques.base import Technique

PACKED_GGUF = (
    5,
    17,
)  # the first transformers that leaves a GGUF's blocks as they are (quantizers/quantizer_gguf.py)
WHERE = "config.quantization_config"


def check(program: Program) -> Iterator[Problem]:
    job, name = program.job, "gguf" if program.model.stored else method(program.model.config)
    if not name:
        return
    if job.framework == "megatron" and name == "fp8" and job.training:
        message = (
            "Megatron trains from a checkpoint of its own in 16 bits, whatever the publisher stores"
        )
        yield Problem(
            message=message, where=WHERE, level="note", hint="what converts it is not counted"
        )
    elif not job.hugging:
        yield Problem(
            message=f"no formula for weights stored by {name} with {job.framework}",
            where="job.framework",
            hint="`transformers` has one",
        )
    if job.quantization != "none":
        message = (
            f"the weights are stored by {name} already, and transformers does not let "
            "bitsandbytes pack them again"
        )
        yield Problem(
            message=message,
            where="job.quant",
            hint="leave `quant` out, or name the checkpoint in 16 bits",
        )
    elif name in ("gptq", "awq") and job.training and not job.adapters:
        message = f"weights stored by {name} cannot be trained"
        yield Problem(
            message=message,
            where="job.method",
            hint="`lora` trains adapters beside them; or name the checkpoint in 16 bits",
        )
    elif name in ("modelopt", "compressed-tensors"):
        yield from foreign(program, name)
    elif name == "gguf":
        yield gguf(program)


def foreign(program: Program, name: str) -> Iterator[Problem]:
    """modelopt is a name that transformers does not know: it would put packed bytes where it wants
    16 bits (transformers 5.23 quantizers/auto.py supports_quant_method). Weights of
    compressed-tensors are unpacked by a package of that name."""
    if program.job.training:
        message = (
            f"transformers has no code for weights stored by {name}, so nothing "
            "can be trained over them"
        )
        yield Problem(message=message, where=WHERE, hint="name the checkpoint in 16 bits")
    else:
        message = (
            f"transformers has no code for weights stored by {name}: weights are "
            "counted as stored, the rest as if it had"
        )
        yield Problem(
            message=message,
            where=WHERE,
            level="warning",
            hint="vLLM, SGLang and TensorRT-LLM run it, and hold other things beside it",
        )


def gguf(program: Program) -> Problem:
    job = program.job
    if job.training:
        message = (
            "blocks of a GGUF cannot be trained, so they are loaded in 16 or 32 bits, as "
            "`precision` says"
        )
        return Problem(
            message=message,
            where="model",
            level="note",
            hint="load the model with `quantization_config=GgufConfig(dequantize=True)`",
        )
    if job.version("transformers") < PACKED_GGUF:
        message = (
            f"transformers before {'.'.join(map(str, PACKED_GGUF))} unpacks a GGUF as it loads it"
        )
        return Problem(message=message, where="model", level="note")
    message = (
        "weights are counted as the file stores them; everything else is what transformers' "
        "code holds, not llama.cpp's"
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
