"""Experts before transformers 5: separate linear layers, which bitsandbytes quantizes and PEFT
adapts; version 5 stacks them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, NamedTuple

from memfit.constants import counted
from memfit.job import Job
from memfit.model.model import Model
from memfit.model.modules import MLP, Block, Layer, Linear, MoE
from memfit.program import Program
from memfit.techniques.base import Technique

STACKED: Annotated[
    tuple[int, int],
    counted(
        "the first version of transformers that keeps a mixture's experts in stacks",
        "transformers 5.0 modeling files of these families",
    ),
] = (5, 0)


class Names(NamedTuple):
    """What the modules were called: the mixture, an expert's gate, up and down. `linear`: the
    router was a linear layer, not a parameter."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    linear: bool = True


TOP2 = Names(block="block_sparse_moe", gate="w1", up="w3", down="w2")
# models/*/modeling_*.py of transformers 4.57.6
SEPARATE = {
    "mixtral": TOP2,
    "phimoe": TOP2,
    "ernie4_5_moe": Names(),
    "olmoe": Names(),
    "qwen2_moe": Names(),
    "qwen3_moe": Names(),
    "deepseek_v2": Names(linear=False),
    "deepseek_v3": Names(linear=False),
    "dots1": Names(linear=False),
    "glm4_moe": Names(linear=False),
}


def separates(model: Model, job: Job) -> bool:
    """Does the job's version of transformers keep the model's experts one by one?"""
    old = job.hugging and job.version("transformers") < STACKED
    return old and model.family in SEPARATE


def apply(program: Program) -> Program:
    """Layouts that share experts out know stacks alone."""
    strategy = program.strategy
    shared_out = strategy.size("tp") > 1 or strategy.size("ep") > 1
    if shared_out or not separates(program.model, program.job):
        return program
    names = SEPARATE[program.model.family]
    return program.rebuilt(lambda layer: separated(layer, names))


def separated(layer: Layer, names: Names) -> Layer:
    """The layer with its experts one by one."""
    return replace(layer, blocks=tuple(one_by_one(block, names) for block in layer.blocks))


def one_by_one(block: Block, names: Names) -> Block:
    mixture = block.mixer
    if not isinstance(mixture, MoE):
        return block
    router = Linear(
        name=f"{names.block}.gate",
        inputs=mixture.inputs,
        outputs=mixture.experts,
        format=mixture.router_format,
    )
    each = tuple(expert(mixture, names, number) for number in range(mixture.experts))
    return replace(
        block,
        mixer=replace(mixture, name=names.block, gate=router if names.linear else None, each=each),
    )


def expert(mixture: MoE, names: Names, number: int) -> MLP:
    path = f"{names.block}.experts.{number}"

    def projection(name: str, inputs: int, outputs: int) -> Linear:
        return Linear(name=f"{path}.{name}", inputs=inputs, outputs=outputs, format=mixture.format)

    return MLP(
        name=path,
        gate=projection(names.gate, mixture.inputs, mixture.width),
        up=projection(names.up, mixture.inputs, mixture.width),
        down=projection(names.down, mixture.width, mixture.inputs),
        activation=mixture.activation,
    )


TECHNIQUE = Technique(
    name="separate experts",
    order=5,
    cite="transformers 4.57.6 models/mixtral/modeling_mixtral.py MixtralSparseMoeBlock",
    wanted=lambda job: job.hugging,
    apply=apply,
)
