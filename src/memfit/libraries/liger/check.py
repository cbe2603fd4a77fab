"""Liger kernels put into transformers' code: which families, and what of them."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.program import Program
from memfit.registry import nearest
from memfit.techniques.base import TRACE, Overlay, Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """What `apply_liger_kernel_to_<model type>` replaces by default (liger-kernel 0.8.5
    transformers/monkey_patch.py)."""

    norms: bool = True
    in_place: bool = True  # the gradient of a norm's input overwrites that of its output
    rope: bool = True
    mlp: bool = True
    experts: bool = False  # a fused kernel for routed experts, which has no formula here
    loss: bool = True  # fused linear cross-entropy exists for the family
    inner: bool = (
        True  # norms of queries and keys too, in a model that is built already (as a Trainer's)
    )
    # its cross-entropy is put where the modelling file no longer looks
    # (`modeling_….CrossEntropyLoss`)
    plain_loss: bool = False


PATCHES: dict[str, Patch] = {
    "llama": Patch(),
    "mistral": Patch(plain_loss=True),
    "ministral": Patch(plain_loss=True),
    "qwen2": Patch(),
    "qwen3": Patch(),
    "smollm3": Patch(),
    "phi3": Patch(),
    "gemma": Patch(),
    "hunyuan_v1_dense": Patch(inner=False),
    "gemma2": Patch(in_place=False),
    "gemma3_text": Patch(in_place=False),
    "gemma3": Patch(in_place=False),
    "olmo2": Patch(in_place=False, inner=False),
    "olmo3": Patch(in_place=False, inner=False),
    "exaone4": Patch(in_place=False),
    "glm4": Patch(in_place=False, rope=False),
    "granite": Patch(loss=False),
    "gpt_oss": Patch(mlp=False),
    "mixtral": Patch(experts=True),
    "qwen3_moe": Patch(experts=True),
    "deepseek_v2": Patch(rope=False, experts=True),
    "deepseek_v3": Patch(rope=False, experts=True),
}
# Others that it has a function for (MODEL_TYPE_TO_APPLY_LIGER_FN).
PATCHED = frozenset(
    {
        "deepseek_v4",
        "falcon_h1",
        "gemma4",
        "gemma4_text",
        "glm4v",
        "glm4v_moe",
        "hunyuan_v1_moe",
        "internvl",
        "llama4",
        "llama4_text",
        "llava",
        "mllama",
        "mllama_text_model",
        "muse_glimmer",
        "nemotron",
        "paligemma",
        "pixtral",
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        "qwen2_vl",
        "qwen2_vl_text",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
        "smolvlm",
    }
)


def wanted(job: Job) -> bool:
    return job.liger or (job.training and job.loss.startswith("liger"))


def check(program: Program) -> Iterator[Problem]:
    job, family = program.job, program.model.family
    patch = PATCHES.get(family)
    where = "job.liger" if job.liger else "job.loss"
    if family in PATCHED:
        message = f"not supported yet: Liger's kernels for the family `{family}`"
        yield Problem(message=message, where=where, hint=TRACE)
        return
    if patch is None:
        close = ", ".join(f"`{one}`" for one in nearest(family, PATCHES))
        yield Problem(
            message=f"Liger has no kernels for the family `{family}`",
            where=where,
            hint=f"supported: {close}" if close else "",
        )
        return
    if job.liger and patch.experts:
        message = f"not supported yet: Liger's fused experts of the family `{family}`"
        yield Problem(
            message=message, where="job.liger", hint="use `--loss liger` without `--liger`"
        )
    if not job.training:
        return
    if job.loss == "liger" and not patch.loss:
        yield Problem(
            message=f"Liger has no fused linear loss for the family `{family}`",
            where="job.loss",
            hint="use `--loss liger-ce`",
        )
    biased = any(weight.role == "bias" for weight in program.model.head.weights())
    if job.loss == "liger" and biased:
        yield Problem(
            message="Liger's fused linear loss does not support a head with bias",
            where="job.loss",
            hint="use `liger-ce`",
        )


TECHNIQUE = Technique(
    name="liger",
    order=170,
    cite="liger-kernel 0.8.5 transformers/monkey_patch.py",
    wanted=wanted,
    apply=lambda program: program,
    check=check,
    overlays=(
        Overlay(
            module="memfit.libraries.liger.kernels",
            applies=lambda program: program.job.liger or program.job.loss.startswith("liger"),
            order=30,
        ),
    ),
)
