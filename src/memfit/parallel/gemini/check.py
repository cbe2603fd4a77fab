"""ColossalAI's Gemini under a loop by hand: 16-bit weights, which its optimizer steps by way of
fp32 copies; and which layers its 1D tensor parallelism splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from memfit.errors import Problem
from memfit.model.modules import Embedding, Latent, Linear, Module, MoE
from memfit.program import Program
from memfit.techniques.base import Engines, Overlay, Technique

HALF = {"bf16": "bfloat16", "fp16": "float16"}
ADAMS = ("adamw", "adamw_fused", "adam", "adam_fused")  # that HybridAdam stands for
M = TypeVar("M", bound=Module)


def apply(program: Program) -> Program:
    """The whole model is cast, buffers too (colossalai 0.3.0 zero/gemini/gemini_ddp.py ZeroDDP)."""
    half = next((HALF[name] for name in HALF if name in program.job.precision), program.weights)
    return program.replace(weights=half, autocast="", master=False, engine="gemini")


def rows(module: M, size: int) -> M:
    """Every linear layer's matrix is cut along its inputs, every table along its width; biases and
    norms stand on every rank (nn/parallel/layers/ linear.py, embedding.py; tables are cut along
    their rows in 0.3.0 itself, which LLMem changed so that a tied head fits)."""
    if isinstance(module, Linear):
        return replace(module, inputs=module.inputs // size)
    if isinstance(module, Embedding):
        return (
            module if module.style == "sinusoidal" else replace(module, width=module.width // size)
        )
    return replace(
        module, **{one.name: cut(getattr(module, one.name), size) for one in fields(module)}
    )


def cut(value: Any, size: int) -> Any:
    """A field of a module."""
    if isinstance(value, tuple):
        return tuple(cut(item, size) for item in value)
    return rows(value, size) if isinstance(value, Module) else value


def split(program: Program) -> Program:
    """The model of one rank of `tp`."""
    model, size = program.model, program.strategy.size("tp")
    ends = {
        "embed": cut(model.embed, size),
        "final": cut(model.final, size),
        "head": rows(model.head, size),
    }
    return program.rebuilt(lambda layer: rows(layer, size), **ends)


def check(program: Program) -> Iterator[Problem]:
    gemini, job, model = program.strategy.gemini, program.job, program.model
    assert gemini is not None
    others = [
        name
        for name, layout in program.strategy.uses()
        if name not in ("gemini", "tp") and layout.size > 1
    ]
    mixers = model.mixers
    odd = (
        (not job.training, "Gemini supports training only", "job.task", "use one GPU, or `tp`"),
        (
            job.framework != "transformers",
            f"Gemini needs a hand-written loop: {job.framework} has its own engines",
            "use gemini",
            "`--framework transformers`",
        ),
        (
            bool(others),
            f"not supported yet: Gemini beside `{', '.join(others)}`",
            "use gemini",
            "use `tp` with it, or nothing",
        ),
        (
            not any(name in job.precision for name in HALF),
            "Gemini supports fp16 and bf16 only",
            "job.precision",
            "use `fp16` or `bf16`",
        ),
        (
            job.method != "full" or program.quant is not None or bool(model.stored),
            ("not supported yet: frozen or quantized weights with Gemini"),
            "job.method",
            "`full`",
        ),
        (
            job.optimizer not in ADAMS,
            f"Gemini uses its own HybridAdam, FusedAdam or CPUAdam, not `{job.optimizer}`",
            "job.optimizer",
            "use `adamw` (HybridAdam)",
        ),
        (
            job.accumulate > 1,
            "Gemini 0.3 stores gradients in place of weights and cannot accumulate",
            "job.accumulate",
            "1",
        ),
        (
            any(isinstance(one, (MoE, Latent)) for one in mixers),
            "not supported yet: experts or latents under Gemini",
            "use gemini",
            "`zero`",
        ),
        (
            gemini.placement in ("auto", "const"),
            f"`{gemini.placement}` moves chunks by measurements at run time",
            "use gemini.placement",
            "use `cuda` or `cpu`",
        ),
        (
            gemini.placement == "cuda"
            and program.gpu is not None
            and program.gpu.vendor not in ("nvidia", "unknown"),
            "Gemini needs CUDA",
            "use gemini",
            "`zero`",
        ),
    )
    for wrong, message, where, hint in odd:
        if wrong:
            yield Problem(message=message, where=where, hint=hint)


def unsplit(program: Program) -> Iterator[Problem]:
    """What keeps ColossalAI's 1D tensor parallelism from a model (tensor/dist_spec_mgr.py
    divide)."""
    model, size = program.model, program.strategy.size("tp")
    modules = [*model.embed, *model.final, model.head, *(layer for layer, _ in model.kinds)]
    linears = [one for module in modules for one in module.linears()]
    if any(one.conv1d for one in linears):
        hint = "use a model with linear layers, like OPT or BLOOM"
        yield Problem(
            message="ColossalAI cannot shard Conv1D layers (GPT-2)", where="use tp", hint=hint
        )
    sizes = {one.inputs for one in linears} | {
        one.width for one in modules if isinstance(one, Embedding)
    }
    for width in sorted(one for one in sizes if one % size):
        message = f"{size} ranks do not divide the {width} inputs of a linear layer"
        yield Problem(message=message, where="use tp", hint="use a size that divides all of them")


TECHNIQUE = Technique(
    name="gemini",
    order=100,
    cite="colossalai 0.3.0 booster/plugin/gemini_plugin.py, zero/gemini/gemini_ddp.py",
    layout="gemini",
    apply=apply,
    check=check,
    overlays=(
        Overlay(
            module="memfit.parallel.gemini.colossalai_tensor_parallel",
            applies=lambda program: program.engine == "gemini",
        ),
    ),
    engines=Engines(
        modules={"gemini": "memfit.parallel.gemini.engine"},
        choose=lambda strategy: "gemini",
        precedence=3,
    ),
)
