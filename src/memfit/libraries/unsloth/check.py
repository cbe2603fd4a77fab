"""Unsloth's kernels put into transformers' code."""

from __future__ import annotations

from memfit.techniques.base import Overlay, Technique

TECHNIQUE = Technique(
    name="unsloth",
    order=190,
    cite="foundation-model-stack/fms-acceleration @876e2ed fms_acceleration_foak",
    wanted=lambda job: bool(job.unsloth),
    apply=lambda program: program,
    overlays=(
        Overlay(
            module="memfit.libraries.unsloth.kernels",
            applies=lambda program: bool(program.job.unsloth),
            order=20,
        ),
    ),
)
