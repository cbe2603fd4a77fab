"""What older versions of transformers ran otherwise, a row each, read in their wheels; the formulas
themselves are those of 5.23."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import eq
from typing import NamedTuple

from memfit.formats import FP32
from memfit.lower import head, ops
from memfit.lower.attention.rotary import picked, turning
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.programs import Programs
from memfit.lower.tensors import Tensor
from memfit.model.model import Model
from memfit.model.modules import Weight
from memfit.program import Program
from memfit.techniques.remote_code import FAMILIES as BROUGHT

Version = tuple[int, int]
NEVER = (1000, 0)  # families whose code came with their checkpoints run it under every version
Rotary = Callable[[Tensor, Tensor, Context], tuple[Tensor, Tensor]]
# Families whose class never made its logits fp32, and cut them for the loss in their own dtype,
# before loss functions were shared (4.49).
NARROW = frozenset(
    {
        "biogpt",
        "bloom",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "mpt",
        "opt",
        "persimmon",
        "qwen",
        "stablelm",
        "xglm",
    }
)
# Families whose logits became fp32 in the model itself for longer, where there were labels.
WIDENED: dict[str, Version] = {
    "starcoder2": (4, 47),
    "mistral": (4, 48),
    "granite": (4, 48),
    "granitemoe": (4, 49),
}


class Change(NamedTuple):
    """Below version `until`, `apply` changes the programs of the families that `which` says."""

    until: Version
    which: Callable[[str], bool]
    apply: Callable[[Programs], Programs]
    cite: str


def changed(programs: Programs, program: Program) -> Programs:
    """The programs of the job's version of transformers."""
    version = program.job.version("transformers")
    for change in reversed(CHANGES):  # the newest first: older code overrides it
        if version < change.until and change.which(program.model.family):
            programs = change.apply(programs)
    return programs


# ------------------------------------------------------------------------------------------ losses
def copied(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """fp32 logits made by the loss function, which then copies all but each sequence's last; the
    model's own logits still stand."""
    scores = head.logits(hidden, model, bound, ctx)
    return shifted(wide(scores, ctx), labels, ctx, scores)


def widened(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """The model made its logits fp32 itself, so only those stand beside the copy."""
    scores = wide(head.logits(hidden, model, bound, ctx), ctx)
    return shifted(scores, labels, ctx, scores)


def padded(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """The model made its logits fp32 itself, and the loss function shifts the labels."""
    scores = wide(head.logits(hidden, model, bound, ctx), ctx)
    ctx.returned.append(scores)
    return head.loss(scores, labels, model, ctx)


def narrow(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Logits and their copy in the dtype of the product; the log-probabilities too, which autocast
    then copies in fp32."""
    scores = head.logits(hidden, model, bound, ctx)
    return shifted(scores, labels, ctx, scores)


def wide(scores: Tensor, ctx: Context) -> Tensor:
    part, ctx.r.part = ctx.r.part, "logits"
    found = ops.cast(ctx.r, scores, FP32)
    ctx.r.part = part
    return found


def shifted(scores: Tensor, labels: Tensor, ctx: Context, output: Tensor) -> Tensor:
    """Cross-entropy over `logits[..., :-1, :].contiguous()`: a copy unless there is one sequence.
    `output` is what the model returns."""
    r, vocabulary = ctx.r, scores.shape[-1]
    ctx.returned.append(output)
    part, r.part = r.part, "logits"
    rows = head.all_but_last(scores, ctx)
    targets = (
        ops.integers(r, (ctx.batch, ctx.tokens - 1), "contiguous") if ctx.batch > 1 else labels
    )
    loss = ops.cross_entropy(
        r,
        rows.view(ctx.batch * (ctx.tokens - 1), vocabulary),
        targets,
        read=FP32 if ctx.autocast is not None else None,
    )
    r.part = part
    return loss


# -------------------------------------------------------------------------------------- generation
def whole_prompt(program: Program) -> bool:
    """Whether `generate` computes the logits of the whole prompt: `num_logits_to_keep` came with
    4.45 to Llama's relatives."""
    model = program.model
    old = program.job.version("transformers") < (4, 45)
    return old or model.whole_prompt or model.family in BROUGHT


def fp32_logits(program: Program) -> bool:
    """Whether the model makes its logits fp32, all of them, before it returns (`logits =
    logits.float()`, until 4.46)."""
    return program.job.version("transformers") < (4, 46) and program.model.family not in NARROW


# From which version on `generate` handed a DynamicCache through; before, the old tuple of tensors
# stood until the next pass began.
CACHED = {
    "bloom": (4, 45),
    "codegen": (4, 45),
    "falcon": (4, 45),
    "gpt_neo": (4, 45),
    "gpt_neox": (4, 45),
    "gptj": (4, 45),
    "opt": (4, 49),
    "biogpt": (4, 53),
    "gpt2": (4, 53),
    "gpt_bigcode": (4, 54),
    "mpt": (4, 54),
    "xglm": (4, 54),
    "qwen": NEVER,
}


# Until which a pass that was handed no cache gave tuples back (`return_legacy_cache`); 4.48
# elsewhere.
RETURNED = {"gpt_neox": (4, 49)} | dict.fromkeys(
    (
        "biogpt",
        "bloom",
        "codegen",
        "falcon",
        "gpt2",
        "gpt_neo",
        "gptj",
        "opt",
        "persimmon",
        "stablelm",
    ),
    (4, 54),
)


def growing(program: Program) -> str:
    """The kind of cache that grows: `dynamic` copies from the first update on; until 4.54
    (cache_utils.py) the first one was only referred to, and no layer forgot what lay behind its
    window."""
    version = program.job.version("transformers")
    if version < CACHED.get(program.model.family, (4, 42)):
        return "tuple"
    return "referenced" if version < (4, 54) else "dynamic"


def fills_cache(program: Program, training: bool) -> bool:
    """Whether a pass with labels fills a key/value cache that nobody reads, `use_cache` being what
    configs say by default.

    A Trainer switches it off since 5.0, in the outer config alone (5.23 trainer.py,
    utils/generic.py merge_with_config_defaults), TRL in the call since 0.22 (trainer/sft_trainer.py
    compute_loss). Checkpointing does wherever it is, but for GPT-BigCode's own loop until 4.53
    (4.52.4 modeling_gpt_bigcode.py GPTBigCodeModel.forward). 4.43 and 4.44 made a cache for
    training where it was still of tuples; Gemma 2 never did."""
    checkpointed = training and program.job.checkpointing != "none"
    job, model, version = program.job, program.model, program.job.version("transformers")
    switched = not job.keep_outputs  # whose loop it is, switches it off
    if not job.hugging or (switched and job.framework == "trl" and job.version("trl") >= (0, 22)):
        return False
    if checkpointed and not (model.family == "gpt_bigcode" and version < (4, 53)):
        return False
    if switched and version >= (5, 0):
        return model.caching and job.framework == "transformers"
    if model.config.get("use_cache", True) is False or (training and model.family == "gemma2"):
        return False
    return not training or growing(program) == "tuple" or not (4, 43) <= version < (4, 45)


def returned_cache(program: Program) -> str:
    """The kind of cache that a pass with labels fills: handed none, code that knew a DynamicCache
    still returned tuples where `RETURNED` says."""
    kind = growing(program)
    return (
        "tuple"
        if kind == "referenced"
        and program.job.version("transformers") < RETURNED.get(program.model.family, (4, 48))
        else kind
    )


# --------------------------------------------------------------------------------------------------
# rotary
# Until which version each layer kept cos and sin of all positions as buffers (`cos_cached`), in the
# dtype of the weights.
TABLES = {
    "llama": (4, 41),
    "mistral": (4, 42),
    "mixtral": (4, 48),
    "qwen2": (4, 45),
    "phi": (4, 45),
    "stablelm": (4, 45),
    "gpt_neox": (4, 45),
    "falcon": (4, 45),
    "persimmon": (4, 45),
    "starcoder2": (4, 45),
}
# And until which it made its own for each pass; later the model makes them once.
ALONE = {"llama": (4, 43), "mistral": (4, 48), "mixtral": (4, 48), "gemma": (4, 48)}


def tables(program: Program) -> tuple[Weight, ...]:
    """The buffers that every layer has then."""
    model = program.model
    if program.job.version("transformers") >= TABLES.get(model.family, (0, 0)) or not model.buffers:
        return ()
    shape = (model.positions, turning(model))
    return tuple(
        Weight(
            name=f"self_attn.rotary_emb.{one}_cached",
            shape=shape,
            role="buffer",
            format=program.weights,
        )
        for one in ("cos", "sin")
    )


def alone(program: Program) -> bool:
    """Whether each layer makes its own cos and sin."""
    family = program.model.family
    return program.job.version("transformers") < max(
        ALONE.get(family, (0, 0)), TABLES.get(family, (0, 0))
    )


def with_own_tables(turn: Rotary) -> Rotary:
    """`turn` after each layer picked the rows of its tables by position; the attention's variables
    hold them."""

    def own(q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        ctx.cos, ctx.sin = picked(ctx)
        found = turn(q, k, ctx)
        ctx.cos = ctx.sin = None
        return found

    return own


# ---------------------------------------------------------------------------------------- the rows
def replaced(
    **losses: Callable[[Tensor, Tensor, Model, Bound, Context], Tensor],
) -> Callable[[Programs], Programs]:
    return lambda programs: programs.replace(losses={**programs.losses, **losses})


def own_buffers(program: Program) -> tuple[Weight, ...]:
    from memfit.lower.attention.qwen import kept

    return kept(program)


CHANGES: tuple[Change, ...] = (
    Change(
        NEVER,
        lambda family: family in BROUGHT,
        lambda programs: replaced(plain=narrow)(programs).replace(buffers=own_buffers),
        "Qwen/Qwen-7B modeling_qwen.py QWenLMHeadModel.forward, RotaryEmbedding",
    ),
    Change(
        (4, 46),
        lambda family: family not in NARROW,
        replaced(plain=widened),
        "4.45.2 models/llama/modeling_llama.py LlamaForCausalLM.forward",
    ),
    *(
        Change(
            until, partial(eq, name), replaced(plain=widened), f"models/{name}/modeling_{name}.py"
        )
        for name, until in WIDENED.items()
    ),
    Change(
        (4, 49),
        lambda family: family in NARROW,
        replaced(plain=narrow),
        "4.48.1 models/gpt_bigcode/modeling_gpt_bigcode.py",
    ),
    Change(
        (4, 49),
        lambda family: family not in NARROW,
        replaced(plain=copied),
        "4.48.1 loss/loss_utils.py ForCausalLMLoss",
    ),
    Change(
        (5, 0),
        partial(eq, "granitemoe"),
        replaced(plain=padded),
        "4.49.0 and 4.57.3 models/granitemoe/modeling_granitemoe.py GraniteMoeForCausalLM.forward",
    ),
)
