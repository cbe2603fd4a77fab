"""Weights of linear layers stored in 4 or 8 bits by bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.job import Job
from memfit.model.model import Model
from memfit.model.modules import MLP
from memfit.program import Program, Quant
from memfit.techniques.base import Overlay, Technique, names, numbered


def apply(program: Program) -> Program:
    """Left as they are: what the job names, or else what transformers leaves, and always what it
    keeps in fp32 (transformers 5.23 quantizers/base.py get_modules_to_not_convert)."""
    job = program.job
    skip = (*(names(job.quant_skip) or whole(program.model)), *program.model.casting)
    compute = program.weights if job.quant_compute == "weights" else job.quant_compute
    quant = Quant(
        format=job.quantization,
        double=job.double_quant,
        skip=skip,
        prepared=job.prepared,
        compute=compute,
        narrowed=NARROWED if narrows(job) else (),
    )
    return numbered(program.replace(quant=quant), skip)


def whole(model: Model) -> tuple[str, ...]:
    """The head, and the module of the model's last parameter: with a tied head, and a final norm
    that has none, that is a matrix of the last layer (transformers 5.23 quantizers/base.py
    get_keys_to_not_convert)."""
    if model.labelled is not None:  # its class has no output embeddings
        return () if model.head.bias else (model.head.name,)
    if model.headless:
        end = list(model.weights())[-1].name  # of a bias the name, which no layer has
        found = (model.head.name, end.removesuffix(".weight") if end.endswith(".weight") else "")
        return tuple(filter(None, found))
    if model.tied and model.last:
        return model.head.name, model.last
    blocks = model.layers[-1].blocks
    last = blocks[-1].mixer if blocks else None
    if (
        not model.tied
        or any(True for module in model.final for _ in module.weights())
        or not isinstance(last, MLP)
    ):
        return (model.head.name,)
    return model.head.name, f"{model.prefix}.{len(model.layers) - 1}.{last.down.name}"


def narrows(job: Job) -> bool:
    """TRL up to 0.25, where it trains 4-bit models under bf16 autocast (trl 0.13
    trainer/sft_trainer.py, trainer/utils.py peft_module_casting_to_bf16)."""
    four = job.quantization in ("nf4", "fp4")
    return (
        job.framework == "trl"
        and job.prepared
        and four
        and job.autocast
        and "bf16" in job.precision
    )


NARROWED = ("lm_head", "embed_tokens", "wte", "wpe")


def check(program: Program) -> Iterator[Problem]:
    job = program.job
    if job.training and not job.adapters:
        yield Problem(
            message="a quantized weight cannot be trained",
            where="job.quant",
            hint="use `--method lora` or `qlora`",
        )
    if (
        job.training
        and job.loss == "liger"
        and not program.model.tied
        and program.quantized(program.model.head, program.model.head.name)
    ):
        yield Problem(
            message="Liger's fused loss needs an unquantized head",
            where="job.quant_skip",
            hint="add `lm_head`",
        )
    if job.quantization == "int8" and job.training and job.version("bitsandbytes") < (0, 45):
        yield Problem(
            message=(
                "not supported yet: training over int8 before bitsandbytes 0.45, which kept its "
                "weights in tiles"
            ),
            where="job.versions",
            hint="use 0.45 or newer",
        )


TECHNIQUE = Technique(
    name="quantize",
    order=70,
    cite="bitsandbytes 0.50 functional.py",
    wanted=lambda job: job.quantization != "none",
    apply=apply,
    check=check,
    overlays=(
        Overlay(
            module="memfit.libraries.bitsandbytes.linears",
            applies=lambda program: program.quant is not None,
        ),
    ),
)
