"""Weights of linear layers stored in 4 or 8 bits by bitsandbytes."""

from __future__ import annotations

from memfit.program import Program, Quant
from memfit.techniques.base import Technique, names


def apply(program: Program) -> Program:
    job = program.job
    quant = Quant(format=job.quantization, double=job.double_quant, skip=frozenset(names(job.quant_skip)), prepared=job.adapters and job.prepare_kbit)
    return program.replace(quant=quant)


TECHNIQUE = Technique(name="quantize", cite="bitsandbytes 0.50 functional.py", wanted=lambda job: job.quantization != "none", apply=apply)
