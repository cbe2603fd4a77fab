"""Experts stored in MXFP4 that cannot stay so: their kernels do not train, and older GPUs have none; then they become 16 bits as
they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.errors import Problem
from memfit.model.modules import Layer, MoE
from memfit.program import Program
from memfit.techniques.base import Technique

LEAST = (7, 5)  # compute capability of the kernels (quantizer_mxfp4.py validate_environment)


def opened(program: Program) -> bool:
    packed = any(
        isinstance(block.mixer, MoE) and block.mixer.format == "mxfp4" for layer, _ in program.model.kinds for block in layer.blocks
    )
    return packed and (program.job.training or program.capability < LEAST)


def apply(program: Program) -> Program:
    if not opened(program):
        return program
    known: dict[Layer, Layer] = {}
    layers = tuple(known.setdefault(layer, open_layer(layer)) for layer in program.model.layers)
    entries = tuple(entry._replace(layer=layers[entry.number]) for entry in program.entries)
    return program.replace(model=replace(program.model, layers=layers), entries=entries, opened=True)


def open_layer(layer: Layer) -> Layer:
    blocks = (replace(block, mixer=replace(block.mixer, format="")) if isinstance(block.mixer, MoE) else block for block in layer.blocks)
    return replace(layer, blocks=tuple(blocks))


def check(program: Program) -> Iterator[Problem]:
    if program.opened and program.job.training:
        yield Problem(
            message="experts stored in MXFP4 cannot be trained, so they are loaded in 16 bits", where="config.quantization_config", level="note",
            hint="load the model with `quantization_config=Mxfp4Config(dequantize=True)`",
        )  # fmt: skip


TECHNIQUE = Technique(
    name="dequantize", cite="transformers 5.23 quantizers/quantizer_mxfp4.py is_trainable; integrations/mxfp4.py", wanted=lambda job: True,
    apply=apply, check=check,
)  # fmt: skip
