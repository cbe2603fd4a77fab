"""Expert parallelism: a rank's share of the experts, and of each one's matrices. Routers and shared experts stand on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.errors import Problem
from memfit.model.modules import Layer, MoE
from memfit.program import Program
from memfit.strategy import EP
from memfit.techniques.base import TRACE, Technique


def apply(program: Program) -> Program:
    ep = program.strategy.ep
    assert ep is not None
    if any(True for _ in problems(program, ep)):
        return program
    return program.rebuilt(lambda layer: share(layer, ep.size, program.strategy.expert_tensor)).replace(spread=True)


def share(layer: Layer, ranks: int, tensor: int) -> Layer:
    """A rank's part of a layer. Of an expert's matrices the first is split along its outputs, the second along its inputs."""
    blocks = tuple(
        replace(block, mixer=replace(block.mixer, local=block.mixer.experts // ranks, width=block.mixer.width // tensor))
        if isinstance(block.mixer, MoE) else block for block in layer.blocks
    )  # fmt: skip
    return replace(layer, blocks=blocks)


def check(program: Program) -> Iterator[Problem]:
    ep = program.strategy.ep
    assert ep is not None
    yield from problems(program, ep) if not program.spread else ()


def problems(program: Program, ep: EP) -> Iterator[Problem]:
    """What keeps the experts from being spread. (After that there is nothing left to ask.)"""
    job, strategy = program.job, program.strategy
    if not program.engine:
        hint = f"`--framework megatron` has one; {TRACE}"
        yield Problem(message=f"no formula yet for expert parallelism of {job.framework}", where="use ep", hint=hint)
        return
    found = {block.mixer for layer, _ in program.model.kinds for block in layer.blocks if isinstance(block.mixer, MoE)}
    if not found:
        yield Problem(message=f"`{program.model.name}` has no experts to spread", where="use ep", hint="leave it away")
    for one in found:
        if one.experts % ep.size:
            yield Problem(message=f"{ep.size} ranks do not divide {one.experts} experts", where="use ep", hint="a size that divides them")
        if one.width % strategy.expert_tensor:
            message = f"{strategy.expert_tensor} ranks do not divide {one.width} values of an expert"
            yield Problem(message=message, where="use ep.tensor", hint="a size that divides them")


TECHNIQUE = Technique(
    name="expert parallel", cite="megatron-core 0.16.1 transformer/moe/experts.py TEGroupedMLP, parallel_state.py (expert groups)",
    apply=apply, check=check, layout="ep",
)  # fmt: skip
