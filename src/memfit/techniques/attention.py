"""Attention kernels that a job forces: can they run on this GPU, in this precision, for these heads
and masks?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from memfit import kernels
from memfit.constants import counted
from memfit.errors import Problem
from memfit.formats import FORMATS
from memfit.model.modules import Attention, Latent
from memfit.program import Program
from memfit.techniques.base import Technique

BACKENDS = ("flash", "efficient", "cudnn", "math")
PACKAGES = ("flash-attn-2", "flash-attn-3")
GROUPS_SINCE: Annotated[
    tuple[int, int],
    counted(
        "the first version of transformers that hands groups of heads over unrepeated",
        "transformers 4.54 integrations/sdpa_attention.py",
    ),
] = (4, 54)
LARGEST_HEAD: Annotated[
    int, counted("width of a head that flash-attn takes at most", "flash-attn 2.8 csrc/flash_attn")
] = 256


def check(program: Program) -> Iterator[Problem]:
    """One problem for each reason, whatever the number of layers."""
    found: dict[str, Problem] = {}
    for layer, _ in program.model.kinds:
        for block in layer.blocks:
            if isinstance(block.mixer, (Attention, Latent)):
                for problem in (packaged if program.job.attention in PACKAGES else forced)(
                    program, block.mixer
                ):
                    found.setdefault(problem.message, problem)
    yield from found.values()


def problem(
    program: Program, reason: str, hint: str = "use `sdpa`, which chooses a kernel that runs"
) -> Problem:
    return Problem(
        message=f"attention `{program.job.attention}` cannot run: {reason}",
        where="job.attention",
        hint=hint,
    )


def sizes(mixer: Attention | Latent) -> tuple[int, int]:
    return (
        (mixer.head, mixer.head)
        if isinstance(mixer, Attention)
        else (mixer.nope + mixer.rope, mixer.value)
    )


def element(program: Program) -> int:
    """Bytes of a value of a query."""
    return FORMATS[program.autocast or program.hidden].block_bytes


def handed(program: Program) -> str:
    """The dtype that the flash-attn package is given. fp32 queries over packed weights, as PEFT's
    fp32 norms make them, are cast to that of the model (transformers 5.23
    integrations/flash_attention.py get_target_dtype)."""
    return program.autocast or (program.weights if program.quant is not None else program.hidden)


def forced(program: Program, mixer: Attention | Latent) -> Iterator[Problem]:
    """SDPA with one backend left (torch 2.13: `No available kernel`)."""
    job = program.job
    if "sdpa" not in mixer.kernels:
        yield problem(
            program, "this family's code does not support SDPA", "use `--attention eager`"
        )
        return
    head, value = sizes(mixer)
    window = mixer.window if isinstance(mixer, Attention) else 0
    masked = not job.packing or 0 < window <= job.reach
    groups = isinstance(mixer, Attention) and mixer.heads != mixer.kv_heads
    grouped = (
        groups
        and not masked
        and head <= LARGEST_HEAD
        and job.version("transformers") >= GROUPS_SINCE
        and job.hugging
    )
    size = element(program)
    backend = kernels.sdpa_backend(
        element=size,
        half=size == 2,
        head=head,
        value_head=value,
        masked=masked,
        causal=not masked,
        query=job.reach,
        key=job.reach,
        grouped=grouped,
        training=job.training,
        capability=program.capability,
        torch=job.version("torch"),
        allowed=(job.attention,),
    )
    if backend != job.attention:
        yield problem(program, why_not(program, size, head, masked, grouped))


def why_not(program: Program, size: int, head: int, masked: bool, grouped: bool) -> str:
    """The first gate that is closed (ATen/native/transformers/cuda/sdp_utils.cpp)."""
    attention, capability = program.job.attention, ".".join(map(str, program.capability))
    if size != 2 and attention in ("flash", "cudnn"):
        return "it needs 16-bit queries"
    if program.capability < (8, 0) and attention in ("flash", "cudnn"):
        return f"it needs compute capability 8.0, and the GPU has {capability}"
    if masked and attention == "flash":
        return "it does not support the mask of padding or a sliding window"
    if grouped and attention == "efficient":
        return "it does not support grouped heads without a mask"
    return f"it does not support heads of {head} values here"


def packaged(program: Program, mixer: Attention | Latent) -> Iterator[Problem]:
    """The flash-attn package (flash-attn v2.8.3 csrc/flash_attn/flash_api.cpp,
    hopper/flash_api.cpp)."""
    third = program.job.attention == "flash-attn-3"
    if "flash" not in mixer.kernels:
        yield problem(program, "this family's code does not support it")
    if FORMATS[handed(program)].block_bytes != 2:
        yield problem(program, "it needs 16-bit queries", "use a 16-bit or autocast `--precision`")
    if max(sizes(mixer)) > LARGEST_HEAD:
        yield problem(program, f"heads have more than {LARGEST_HEAD} values")
    if program.capability < (8, 0) or (third and program.capability[0] > 9):
        capability = ".".join(map(str, program.capability))
        yield problem(
            program,
            f"the GPU has compute capability {capability}",
            "`flash-attn-2` needs 8.0 or newer, `flash-attn-3` 8.0 to 9.0",
        )


TECHNIQUE = Technique(
    name="attention",
    order=160,
    cite="torch 2.13 ATen/native/transformers/cuda/sdp_utils.cpp",
    wanted=lambda job: job.attention in (*BACKENDS, *PACKAGES),
    apply=lambda program: program,
    check=check,
)
