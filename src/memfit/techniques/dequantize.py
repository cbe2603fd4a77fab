"""Checkpoints stored in MXFP4 or fp8 that cannot stay so: they become 16 bits as they are loaded,
where weights are trained, where the library trains nothing over them, and on GPUs that have no
kernels for them."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.lazy_dataclass import dataclass
from memfit.model.quantized import converted, method
from memfit.program import Program
from memfit.techniques.base import Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class Stays:
    """`least`: compute capability of the kernels; `loads`, `adapts`: the first transformers that
    makes 16 bits of it, and that trains adapters over it; `config`: what asks for 16 bits;
    `packages`: without these it becomes 16 bits everywhere."""

    name: str
    least: tuple[int, int]
    loads: tuple[int, int]
    adapts: tuple[int, int]
    config: str
    packages: str = ""


NEVER = (10**4, 0)
STAYS = {
    # quantizers/quantizer_mxfp4.py validate_environment, is_trainable: False up to 5.23
    "mxfp4": Stays(
        name="MXFP4",
        least=(7, 5),
        loads=(4, 55),
        adapts=NEVER,
        config="Mxfp4Config(dequantize=True)",
        packages="`kernels` and Triton 3.4",
    ),
    # quantizers/quantizer_finegrained_fp8.py; before 5.0 it raises on older GPUs and in training;
    # is_trainable from 5.22 on
    "fp8": Stays(
        name="fp8",
        least=(8, 9),
        loads=(5, 0),
        adapts=(5, 22),
        config="FineGrainedFP8Config(dequantize=True)",
    ),
}


def old(program: Program, stays: Stays) -> bool:
    """A GPU of which nothing is known is taken to have the kernels."""
    known = program.gpu is not None and program.gpu.sm is not None
    return known and program.capability < stays.least


def opened(program: Program) -> str:
    """The method, where its weights do not stay as they are stored."""
    name, job = method(program.model.config), program.job
    stays = STAYS.get(name)
    if stays is None:
        return ""
    trains = job.training and not (job.adapters and job.version("transformers") >= stays.adapts)
    return name if trains or old(program, stays) else ""


def apply(program: Program) -> Program:
    found = opened(program)
    if not found:
        return program
    return program.rebuilt(lambda layer: converted(layer, "", frozenset())).replace(opened=found)


def check(program: Program) -> Iterator[Problem]:
    job, where = program.job, "config.quantization_config"
    stays = STAYS.get(method(program.model.config))
    if stays is None or (
        program.opened and job.framework == "megatron"
    ):  # its own checkpoints are no publisher's
        return
    if program.opened and job.version("transformers") < stays.loads:
        message = (
            f"transformers before {'.'.join(map(str, stays.loads))} cannot train on "
            f"{stays.name} weights or dequantize them"
        )
        yield Problem(
            message=message,
            where=where,
            hint="use newer `--versions`, a newer GPU, or the 16-bit checkpoint",
        )
    elif program.opened and job.training:
        message = (
            f"weights stored in {stays.name} cannot be trained{' over' if job.adapters else ''}, "
            "so they are dequantized to 16 bits"
        )
        yield Problem(
            message=message,
            where=where,
            level="note",
            hint=f"load the model with `quantization_config={stays.config}`",
        )
    elif program.opened:
        message = (
            f"this GPU has no kernels for {stays.name} weights, so they are dequantized to 16 bits"
        )
        hint = f"they need compute capability {'.'.join(map(str, stays.least))} or newer"
        yield Problem(message=message, where=where, level="warning", hint=hint)
    elif stays.packages:
        message = (
            f"weights stay in {stays.name} only if {stays.packages} are installed; "
            "otherwise they are dequantized to 16 bits"
        )
        yield Problem(message=message, where=where, level="note", hint=f"install {stays.packages}")


TECHNIQUE = Technique(
    name="dequantize",
    order=50,
    cite=(
        "transformers 5.23 quantizers/quantizer_mxfp4.py, quantizer_finegrained_fp8.py; "
        "integrations/mxfp4.py"
    ),
    wanted=lambda job: True,
    apply=apply,
    check=check,
)
