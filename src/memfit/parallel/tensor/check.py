"""Tensor parallelism: the model of one rank, with its share of every matrix. Who gathers and adds
up what, and when, is the framework's own code in `lower`.

A column-parallel matrix is split along its outputs, the row-parallel one after it along its inputs;
norms and routers stand on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from memfit.errors import Problem
from memfit.job import Job
from memfit.libraries.trl.check import head_of
from memfit.model import modules
from memfit.model.modules import MLP, Attention, Embedding, Latent, Layer, Linear, Module, MoE
from memfit.parallel.gemini import check as gemini
from memfit.program import Program
from memfit.strategy import TP
from memfit.techniques.base import TRACE, Overlay, Technique
from memfit.techniques.base import names as listed

Mixer = Attention | Latent | MLP | MoE
# Of frameworks whose code is written; torch's styles on the same layers do what transformers' own
# plan does.
STYLES = {
    "megatron": ("megatron",),
    "transformers": ("transformers", "dtensor"),
    "trl": ("transformers", "dtensor"),
    "torchtitan": ("dtensor",),
}
WHOLE = frozenset(
    {"stablelm"}
)  # attention that reshapes to the heads of the whole model, and stops (transformers 5.23)


def apply(program: Program) -> Program:
    tp = program.strategy.tp
    assert tp is not None
    if any(True for _ in problems(program)):
        return program
    if program.engine == "gemini":
        return gemini.split(program).replace(split=True)
    model, size, alone = program.model, tp.size, program.strategy.size("ep") == 1
    ends: dict[str, Any] = (
        {}
        if not tp.vocabulary
        else {"head": replace(model.head, outputs=model.head.outputs // size)}
    )
    if tp.vocabulary and tabled(program):
        ends["embed"] = tuple(table(module, size) for module in model.embed)
    kept = unsplit(program) | (frozenset() if alone else {"experts"})
    return program.rebuilt(lambda layer: share(layer, size, kept), **ends).replace(split=True)


def tabled(program: Program) -> bool:
    """Whether ranks share the table of tokens: transformers' own plan has it since 5.21, where it
    has one for what lies between table and head (distributed/mixin.py init_parallel_plans)."""
    return bool(program.engine) or (
        program.job.version("transformers") >= UNEVEN and "table" not in unsplit(program)
    )


# What transformers' own plans leave whole on every rank (5.23 `base_model_tp_plan` of each family's
# config).
JOINED = frozenset(
    {"heads"}
)  # norms over all heads: queries, keys and values are gathered, and each rank has all the heads
UNSPLIT: dict[str, frozenset[str]] = {
    "deepseek_v3": frozenset({"attention"}),
    "granitemoe": frozenset({"attention"}),
    "phimoe": frozenset({"attention"}),
    "olmo2": JOINED,
    "olmo3": JOINED,
    "olmoe": JOINED,
    "minimax_m2": JOINED,
    "qwen2_moe": frozenset({"shared"}),
    "glm4_moe_lite": frozenset({"shared"}),
    "gpt_oss": frozenset({"attention", "experts", "table"}),
}


def unsplit(program: Program) -> frozenset[str]:
    return frozenset() if program.engine else UNSPLIT.get(program.model.family, frozenset())


def summed(program: Program) -> bool:
    """Whether ranks share each expert's matrices by transformers' plan, so that what experts give
    is a part of a sum."""
    return (
        program.split
        and not program.engine
        and program.strategy.size("ep") == 1
        and "experts" not in unsplit(program)
    )


def share(layer: Layer, size: int, kept: frozenset[str]) -> Layer:
    """A rank's part of a layer, in which what is `kept` stays whole."""
    return replace(
        layer,
        blocks=tuple(replace(block, mixer=part(block.mixer, size, kept)) for block in layer.blocks),
    )


def part(mixer: Mixer, size: int, kept: frozenset[str]) -> Mixer:
    if isinstance(mixer, MoE):
        shared = (
            mixer.shared
            if mixer.shared is None or "shared" in kept
            else feed_forward(mixer.shared, size)
        )
        return replace(
            mixer, shared=shared, width=mixer.width if "experts" in kept else mixer.width // size
        )
    if isinstance(mixer, MLP):
        return feed_forward(mixer, size)
    if "attention" in kept:
        return mixer
    if isinstance(mixer, Latent):
        return latent(mixer, size)
    if "heads" in kept:
        project = tuple(replace(column(one, size), joined=True) for one in mixer.project)
        return replace(mixer, project=project, out=replace(row(mixer.out, size), joined=True))
    heads, kv = mixer.heads // size, max(1, mixer.kv_heads // size)
    outputs = (heads * mixer.head, kv * mixer.head, kv * mixer.head)
    project = tuple(
        replace(one, outputs=count, across=modules.COLUMNS)
        for one, count in zip(mixer.project, outputs, strict=True)
    )
    return replace(mixer, heads=heads, kv_heads=kv, project=project, out=row(mixer.out, size))


def feed_forward(mixer: MLP, size: int) -> MLP:
    gate = None if mixer.gate is None else column(mixer.gate, size)
    return replace(mixer, gate=gate, up=column(mixer.up, size), down=row(mixer.down, size))


def latent(mixer: Latent, size: int) -> Latent:
    """Heads are shared out; the way down to the latents stands on every rank
    (core/transformer/multi_latent_attention.py)."""
    q_proj, q_b = (None if one is None else column(one, size) for one in (mixer.q_proj, mixer.q_b))
    return replace(
        mixer,
        heads=mixer.heads // size,
        q_proj=q_proj,
        q_b=q_b,
        kv_b=column(mixer.kv_b, size),
        out=row(mixer.out, size),
    )


def column(linear: Linear, size: int) -> Linear:
    return replace(linear, outputs=linear.outputs // size, across=modules.COLUMNS)


def row(linear: Linear, size: int) -> Linear:
    """The bias is added after the sum over the ranks, by each of them."""
    return replace(linear, inputs=linear.inputs // size, across=modules.ROWS)


def table(module: Module, size: int) -> Module:
    """Rows of the table of tokens; other embeddings stand on every rank."""
    if isinstance(module, Embedding) and module.style == "tokens":
        return replace(module, rows=module.rows // size)
    return module


def check(program: Program) -> Iterator[Problem]:
    yield from problems(program) if not program.split else ()


def problems(program: Program) -> Iterator[Problem]:
    """What keeps the model from being split. (After the split there is nothing left to ask.)"""
    tp, job = program.strategy.tp, program.job
    assert tp is not None
    own = ("colossalai",) if program.engine == "gemini" else STYLES.get(job.framework)
    if own is None:
        hint = f"supported: {', '.join(sorted(STYLES))}; {TRACE}"
        yield Problem(
            message=f"not supported yet: tensor parallelism of {job.framework}",
            where="use tp",
            hint=hint,
        )
        return
    if tp.style not in ("auto", *own):
        yield Problem(
            message=f"{job.framework} has its own tensor parallelism, not `{tp.style}`",
            where="use tp.style",
            hint=f"use `{own[0]}`, or remove it",
        )
    if program.engine == "gemini":
        settings = [name for name in ("sequence", "parallel_loss") if getattr(tp, name)]
        for name in settings:
            yield Problem(
                message="ColossalAI's tensor parallelism does not support this setting",
                where=f"use tp.{name}",
                hint="remove it",
            )
        yield from gemini.unsplit(program)
        return
    if not tp.vocabulary and program.engine:
        yield Problem(
            message="Megatron always shards the vocabulary",
            where="use tp.vocabulary",
            hint="remove it",
        )
    if not program.engine:
        yield from planned(program, tp)
    yield from uneven(program, tp)


# How transformers' own plan splits the linear layers of models like Llama, by the end of their
# paths. transformers that PEFT puts adapters on split layers of (peft 0.21 tuners/lora/model.py
# get_tp_plan_and_mesh); whose splits may be uneven (`_from_local_last_dim_shard(x, mesh,
# module.in_features)`).
PLANNED, UNEVEN = (5, 17), (5, 21)
COLUMNS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj"})
ROWS = frozenset({"o_proj", "down_proj"})
SUMMED = frozenset(
    {"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "exaone4", "dots1"}
)  # whose plan sums up gradients of norms of heads
ALONE = frozenset(
    {"q_a_proj", "kv_a_proj_with_mqa", "shared_expert_gate"}
)  # that stand on every rank


def cut(program: Program) -> frozenset[str]:
    """The names of the weights that every rank has a part of: what a layer split by rows adds, each
    adds whole."""
    model = program.model
    linears = [one for layer, _ in model.kinds for one in layer.linears()]
    parts = {modules.COLUMNS: ("weight", "bias", "lora_B"), modules.ROWS: ("weight", "lora_A")}
    names = {f"{one.name}.{part}" for one in linears for part in parts.get(one.across, ())}
    ends = {
        weight.name
        for module in (*(model.embed if tabled(program) else ()), model.head)
        for weight in module.weights()
    }
    return frozenset(names | ends)


def planned(program: Program, tp: TP) -> Iterator[Problem]:
    """What transformers' own plan does to models like Llama, trained whole, with FSDP2 beside it or
    not."""
    job, model, strategy = program.job, program.model, program.strategy
    names = {
        linear.name.rpartition(".")[2] for layer, _ in model.kinds for linear in layer.linears()
    }
    norms = {
        mixer.q_norm.width != mixer.head for mixer in model.attentions if mixer.q_norm is not None
    }
    styles = {one.style for one in model.attentions}
    odd = (
        (
            tp.style == "transformers" and (tp.sequence or tp.parallel_loss),
            "with `sequence` or `parallel_loss`, which its own plan does not have",
        ),
        (
            tp.sequence
            and (
                not job.training
                or any(
                    len(layer.blocks) != 2 or layer.parallel or block.order != "pre"
                    for layer, _ in model.kinds
                    for block in layer.blocks
                )
            ),
            "with sequence parallelism",
        ),
        (tp.parallel_loss and not job.training, "with a parallel loss"),
        (not tp.vocabulary, "with an unsharded embedding and head"),
        (
            tp.style == "dtensor" and bool(model.mixtures),
            "of experts with torch's parallel styles",
        ),
        (
            tp.sequence and bool(model.mixtures),
            "of experts with sequence parallelism",
        ),
        (job.version("transformers") < PLANNED, "before 5.17"),
        (model.tied and not tabled(program), "before 5.21 with a tied head"),
        (bool(model.stored), "of quantized weights"),
        (not job.training and strategy.data > 1, "with other layouts"),
        (bool(job.unsloth), "with Unsloth's kernels"),
        (
            strategy.size("cp") * strategy.size("zero") > 1
            or (strategy.fsdp is None and strategy.data > 1),
            "with layouts other than FSDP2 and pipelines",
        ),
        (
            not names <= COLUMNS | ROWS | ALONE
            or (True in norms and "heads" not in unsplit(program))
            or model.head.name != "lm_head"
            or bool(model.towers)
            or bool(styles & WHOLE),
            f"of the family `{model.family}` in this configuration",
        ),
    )
    for wrong, what in odd:
        if wrong:
            yield Problem(
                message=f"not supported yet: transformers' tensor parallelism {what}",
                where="use tp",
                hint=TRACE,
            )
    yield from adapted(job, tp, targets_of(program))
    if "heads" in unsplit(program):
        yield from joined(program, tp)
    yield from copied(
        one for one in listed(job.modules_to_save) if job.adapters and copies(program, one)
    )
    yield from headed(job, tp)
    yield from masked(
        job,
        tp,
        {mixer.window for mixer in model.attentions},
    )


GATHERS = (
    1,
    7,
)  # TRL whose heads gather a weight that is cut (trainer/sft_trainer.py `full_tensor`)


def headed(job: Job, tp: TP) -> Iterator[Problem]:
    """Losses and kernels that torch stops at, as their own code was seen to on two ranks."""
    if job.loss == "liger":
        message = (
            "Liger's fused loss fails under tensor parallelism, where the head is a "
            "DTensor (liger-kernel 0.8.5 ops/fused_linear_cross_entropy.py)"
        )
        hint = "use `--loss liger-ce`, or `--framework trl`, whose head gathers the weight"
        yield Problem(message=message, where="job.loss", hint=hint)
    if tp.sequence and job.liger:
        message = (
            "Liger's norms fail with sequence parallelism, because they gather the "
            "sequence (liger-kernel 0.8.5 ops/rms_norm.py `full_tensor`)"
        )
        yield Problem(message=message, where="job.liger", hint="remove it, or `sequence`")
    own = head_of(job) != "plain"
    if own and job.version("trl") < GATHERS:
        message = (
            "TRL before 1.7 fails under tensor parallelism, where the head is a "
            "DTensor (trainer/sft_trainer.py)"
        )
        yield Problem(
            message=message, where="job.versions", hint="use a newer TRL, which gathers the weight"
        )
    if tp.sequence and own:
        message = (
            "TRL's head fails with sequence parallelism, where the hidden states are "
            "a DTensor (trl 1.7 to 1.16)"
        )
        yield Problem(message=message, where="use tp.sequence", hint="remove it")


def masked(job: Job, tp: TP, windows: set[int]) -> Iterator[Problem]:
    """transformers makes a mask as long as what the embedding gives, which is a part of the
    sequence (5.23 masking_utils.py), for both producers."""
    if tp.sequence and (
        job.attention == "eager"
        or not job.packing
        or any(0 < window < job.seq for window in windows)
    ):
        message = (
            "attention with a mask fails with sequence parallelism: transformers "
            "builds the mask for one rank's part"
        )
        yield Problem(
            message=message,
            where="use tp.sequence",
            hint="use `--attention sdpa` on packed sequences, or remove `sequence`",
        )


def targets_of(program: Program) -> frozenset[str]:
    """The last names of the linear layers that get adapters."""
    linears = [linear for layer, _ in program.model.kinds for linear in layer.linears()]
    return frozenset(
        one.name.rpartition(".")[2]
        for one in linears
        if program.adapter is not None and program.adapted(one)
    )


def adapted(job: Job, tp: TP, targets: frozenset[str]) -> Iterator[Problem]:
    """What transformers, PEFT and bitsandbytes stop at, as their own code was seen to on two ranks,
    for both producers."""
    if job.quantization != "none":
        message = (
            "bitsandbytes weights cannot be sharded: transformers' DTensors lose the "
            "quantization constants (transformers 5.23 core_model_loading.py)"
        )
        yield Problem(
            message=message,
            where="job.quant",
            hint="use `zero,stage=3` or `fsdp` to shard quantized weights",
        )
    if not job.adapters:
        return
    if tp.style == "dtensor" or tp.sequence or tp.parallel_loss or not tp.vocabulary:
        message = (
            "torch's parallel styles do not shard PEFT's layers; PEFT supports "
            "transformers' own plan only"
        )
        yield Problem(message=message, where="use tp", hint="remove the settings of `tp`")
    if job.version("transformers") >= UNEVEN and targets & ROWS:
        message = (
            "transformers 5.21 and newer fails in the first forward with adapters on layers "
            "that are split by rows: "
        ) + ", ".join(f"`{one}`" for one in sorted(targets & ROWS))
        columns = ",".join(sorted(targets & COLUMNS)) or "q_proj,v_proj"
        yield Problem(
            message=message,
            where="job.targets",
            hint=f"use `--targets {columns}`, or `--versions transformers=5.20`",
        )


def copied(saved: Iterable[str]) -> Iterator[Problem]:
    """`modules_to_save` of what is split: the copy's forward is the original's, as seen on two
    ranks, so that it gets neither gradients nor states."""
    for one in saved:
        message = (
            f"PEFT's copy of `{one[:60]}` would not be trained: the sharded module's "
            "forward always runs the original (transformers 5.23 "
            "distributed/tensor_parallel.py install_forward)"
        )
        yield Problem(
            message=message,
            where="job.modules_to_save",
            hint=(
                "choose modules that are not sharded, like `norm`, or use `zero,stage=3` or `fsdp`"
            ),
        )


def copies(program: Program, name: str) -> bool:
    """Whether a copy of the modules of this name holds anything that the plan names."""
    model, kept = program.model, unsplit(program)
    ends = {
        weight.name.rpartition(".")[0]
        for module in (*model.embed, model.head)
        for weight in module.weights()
    }
    inside = {
        f"{model.prefix}.0.{path}"
        for mixer in model.mixers
        for path in named(mixer, kept, model.family)
    }
    assert program.adapter is not None
    adapter = replace(program.adapter, saved=(name,))
    return any(adapter.saves(path) for path in inside | ends)


def named(mixer: Mixer, kept: frozenset[str], family: str) -> Iterator[str]:
    """Modules of a mixer that the plan names."""
    split: Mixer = part(mixer, 1, kept)
    yield from (one.name for one in split.linears() if one.across)
    if isinstance(mixer, MoE):
        yield f"{mixer.name}.{mixer.experts_name}"
    if isinstance(mixer, Attention) and family in SUMMED:
        yield from (one.name for one in (mixer.q_norm, mixer.k_norm) if one is not None)
    if isinstance(split, Latent) and split.out.across:
        yield split.kv_a.name


def joined(program: Program, tp: TP) -> Iterator[Problem]:
    """What stops at norms over all heads, as torch's styles and PEFT's code were seen to."""
    if tp.style == "dtensor" or tp.sequence or tp.parallel_loss:
        message = "torch's parallel styles shard the heads, so norms over all heads fail"
        yield Problem(
            message=message,
            where="use tp",
            hint="remove the settings of `tp`: transformers' own plan gathers them",
        )
    if parts := sorted(targets_of(program) & {"q_proj", "k_proj", "v_proj"}):
        message = (
            "PEFT fails when it adds a sharded adapter output to a gathered one "
            "(peft 0.21 tuners/lora/layer.py)"
        )
        shown = ", ".join(f"`{one}`" for one in parts)
        yield Problem(
            message=f"{message}: {shown}",
            where="job.targets",
            hint="use `gate_proj` and `up_proj` if the model has them",
        )


def uneven(program: Program, tp: TP) -> Iterator[Problem]:
    """Sizes that the ranks do not divide."""
    found: dict[str, int] = {}
    kept = unsplit(program) | (frozenset() if program.strategy.size("ep") == 1 else {"experts"})
    for layer, _ in program.model.kinds:
        for block in layer.blocks:
            mixer = block.mixer
            if "attention" in kept and isinstance(mixer, Attention | Latent):
                continue
            if isinstance(mixer, Attention) and "heads" in kept:
                widths = {one.outputs for one in mixer.project} | {mixer.out.inputs}
                found |= {f"{width} values of the heads": width % tp.size for width in widths}
            elif isinstance(mixer, Attention):
                found |= {f"{mixer.heads} query heads": mixer.heads % tp.size}
                copied = (
                    tp.size % mixer.kv_heads if program.engine else tp.size
                )  # Megatron has copies where there are fewer than ranks
                found |= {
                    f"{mixer.kv_heads} key/value heads": min(mixer.kv_heads % tp.size, copied)
                }
                if len(mixer.project) != 3:
                    message = (
                        "not supported yet: tensor parallelism of a fused query-key-value matrix"
                    )
                    yield Problem(message=message, where="use tp", hint=TRACE)
            elif isinstance(mixer, MLP):
                found |= {f"{mixer.width} values of the feed-forward": mixer.width % tp.size}
            elif isinstance(mixer, Latent):
                found |= {f"{mixer.heads} query heads": mixer.heads % tp.size}
            else:
                found |= routed(mixer, tp, kept)
                if program.engine and not tp.sequence:
                    message = (
                        "Megatron trains experts under tensor parallelism only with sequence "
                        "parallelism"
                    )
                    yield Problem(
                        message=message, where="use tp.sequence", hint=f"`tp={tp.size},sequence`"
                    )
    if not program.engine and program.model.labelled is None:
        found |= {
            f"{program.model.head.outputs} rows of the vocabulary": program.model.head.outputs
            % tp.size
        }
    if tp.sequence:
        found |= {f"{program.job.seq} tokens": program.job.seq % tp.size}
    for what, rest in found.items():
        if rest:
            yield Problem(
                message=f"{tp.size} ranks do not divide {what}",
                where="use tp",
                hint="use a size that divides all of them",
            )


def routed(mixer: MoE, tp: TP, kept: frozenset[str]) -> dict[str, int]:
    """What is left over of shared experts, and of each expert, where ranks share them."""
    shared = None if "shared" in kept else mixer.shared
    found = (
        {}
        if shared is None
        else {f"{shared.width} values of the shared experts": shared.width % tp.size}
    )
    return found | (
        {} if "experts" in kept else {f"{mixer.width} values of an expert": mixer.width % tp.size}
    )


def used(program: Program) -> bool:
    return program.strategy.tp is not None


TECHNIQUE = Technique(
    name="tensor parallel",
    order=110,
    cite="Megatron-LM core 0.16.1 tensor_parallel/layers.py, transformer/attention.py "
    "(num_query_groups_per_partition); "
    "transformers 5.23 distributed/tensor_parallel.py",
    apply=apply,
    check=check,
    layout="tp",
    overlays=(
        Overlay(module="memfit.parallel.tensor.dtensor", applies=used),
        Overlay(
            module="memfit.parallel.expert.dispatch",
            applies=used,
        ),
    ),
)
