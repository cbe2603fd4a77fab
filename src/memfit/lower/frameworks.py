"""Frameworks, a row each: whose code runs a model's pieces, and how its loop differs."""

from __future__ import annotations

from memfit.lower import liger, litgpt, megatron, torchtitan, torchtune, unsloth, versions
from memfit.lower.attention import ATTENTION
from memfit.lower.attention.rotary import rotary
from memfit.lower.layers import ORDERS
from memfit.lower.losses import LOSSES
from memfit.lower.mlp import MLPS
from memfit.lower.moe import MOES
from memfit.lower.norms import NORMS
from memfit.lower.programs import Programs
from memfit.program import Program

TRANSFORMERS = Programs(norms=NORMS, attention=ATTENTION, mlps=MLPS, moes=MOES, orders=ORDERS, losses=LOSSES)
TORCHTUNE = Programs(
    norms={"llama": torchtune.rms_norm}, attention={"llama": torchtune.attention}, mlps={"gated": MLPS["gated"]}, moes={}, orders={"pre": torchtune.order},
    losses={"plain": torchtune.plain, "chunked": torchtune.chunked}, start=torchtune.start, buffers=torchtune.buffers,
    layer_buffers=torchtune.layer_buffers,
)  # fmt: skip
TORCHTITAN = Programs(
    norms={"llama": torchtitan.rms_norm}, attention={"llama": torchtitan.attention, "qwen3": torchtitan.attention}, mlps={"gated": MLPS["gated"]},
    moes={}, orders={"pre": ORDERS["pre"]}, losses={"plain": torchtitan.plain, "chunked": torchtitan.chunked}, start=torchtitan.start,
    layer_buffers=torchtitan.layer_buffers, kernels=torchtitan.KERNELS, choices=torchtitan.choices, whole=True,
)  # fmt: skip
LITGPT = Programs(
    norms={**litgpt.NORMS, "layer": NORMS["layer"]}, attention=dict.fromkeys(("llama", "qwen3", "gemma2", "falcon", "phi", "gpt_neox"), litgpt.attention),
    mlps=litgpt.MLPS, moes={}, orders={}, losses={"plain": litgpt.loss}, layer=litgpt.layer, start=litgpt.start, buffers=litgpt.buffers, keeps_outputs=True,
    validates=True,
)  # fmt: skip
MEGATRON = Programs(
    norms={"llama": megatron.rms_norm}, attention={}, mlps={}, moes={}, orders={}, losses={"plain": megatron.plain}, layer=megatron.layer,
    start=megatron.start, buffers=megatron.buffers, kept=megatron.kept, reentrant=True,
)  # fmt: skip
FRAMEWORKS: dict[str, Programs] = {
    "transformers": TRANSFORMERS,
    "trl": TRANSFORMERS,
    "torchtune": TORCHTUNE,
    "torchtitan": TORCHTITAN,
    "litgpt": LITGPT,
    "megatron": MEGATRON,
}


def programs_of(program: Program) -> Programs:
    """Who runs this job's model."""
    programs = FRAMEWORKS.get(program.job.framework)
    if programs is None:
        raise NotImplementedError(f"the code of {program.job.framework}")
    if program.job.framework in ("transformers", "trl"):
        programs = versions.changed(programs, program)
    if program.job.unsloth:
        programs = unsloth.overlay(programs, frozenset(name.strip() for name in program.job.unsloth.split(",")))
    if program.job.liger:
        programs = liger.overlay(programs, program.model.family)
    if program.job.framework in ("transformers", "trl") and versions.alone(program):
        programs = programs.replace(rotary=versions.with_own_tables(programs.rotary or rotary))
    return programs
