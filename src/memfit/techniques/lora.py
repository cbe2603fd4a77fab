"""LoRA as PEFT does it: the base is frozen, adapters stand beside the linear layers, in fp32 unless told otherwise."""

from __future__ import annotations

from memfit.program import Adapter, Program
from memfit.techniques.base import Technique, names


def apply(program: Program) -> Program:
    job = program.job
    targets = frozenset() if job.targets == "all-linear" else frozenset(names(job.targets))
    base = program.weights
    kept = "float32" if job.adapter_dtype == "float32" and base in ("bfloat16", "float16") else base
    adapter = Adapter(rank=job.rank, dropout=job.dropout, format=kept, targets=targets, saved=names(job.modules_to_save))
    return program.replace(adapter=adapter, trained=(), input_gradients=job.checkpointing != "none")


TECHNIQUE = Technique(name="lora", cite="peft 0.21 tuners/lora/layer.py", wanted=lambda job: job.adapters, apply=apply)
