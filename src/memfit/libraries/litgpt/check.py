"""A framework's own modules in the place of those that a checkpoint's publisher wrote: one
projection of queries, keys and values may take adapters for each of the three, and linear layers
are torch's own."""

from __future__ import annotations

from dataclasses import replace

from memfit.job import Job
from memfit.model.modules import MLP, Attention, Latent, Layer, Linear, MoE
from memfit.program import Program
from memfit.techniques.base import Technique
from memfit.techniques.framework import facts_of

Mixer = Attention | Latent | MLP | MoE


def apply(program: Program) -> Program:
    """Layers that are alike stay one object."""
    made: dict[int, Layer] = {}
    split = program.job.adapters

    def own(layer: Layer) -> Layer:
        if id(layer) not in made:
            blocks = tuple(
                replace(block, mixer=mixer(block.mixer, split)) for block in layer.blocks
            )
            made[id(layer)] = replace(layer, blocks=blocks)
        return made[id(layer)]

    if program.model.family not in facts_of(program.job.framework).joined:
        return program
    model = replace(program.model, layers=tuple(own(layer) for layer in program.model.layers))
    return program.replace(
        model=model,
        entries=tuple(entry._replace(layer=own(entry.layer)) for entry in program.entries),
    )


def mixer(module: Mixer, split: bool) -> Mixer:
    if isinstance(module, MLP):
        return replace(module, up=plain(module.up), down=plain(module.down))
    if not isinstance(module, Attention):
        return module
    project = (
        in_three(module)
        if split and len(module.project) == 1
        else tuple(plain(one) for one in module.project)
    )
    return replace(module, project=project, out=plain(module.out))


def plain(linear: Linear) -> Linear:
    return replace(linear, own_class=False)


def in_three(module: Attention) -> tuple[Linear, ...]:
    whole, (path, _, _) = module.project[0], module.project[0].name.rpartition(".")
    rows = zip(
        ("q_proj", "k_proj", "v_proj"),
        (module.heads, module.kv_heads, module.kv_heads),
        strict=True,
    )
    return tuple(
        replace(whole, name=f"{path}.{name}", outputs=count * module.head, own_class=False)
        for name, count in rows
    )


def wanted(job: Job) -> bool:
    return bool(facts_of(job.framework).joined)


TECHNIQUE = Technique(
    name="own",
    order=20,
    cite="litgpt 0.5.13 lora.py LoRAQKVLinear, model.py",
    wanted=wanted,
    apply=apply,
)
