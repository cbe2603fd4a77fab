"""Tensor parallelism: the model of one rank, with its share of every matrix. Who gathers and adds up what, and when, is the framework's
own code in `lower`.

A column-parallel matrix is split along its outputs, the row-parallel one after it along its inputs; norms and routers stand on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memfit.errors import Problem
from memfit.job import Job
from memfit.model.modules import MLP, Attention, Embedding, Latent, Layer, Linear, Module, MoE
from memfit.program import Program
from memfit.strategy import TP
from memfit.techniques import gemini
from memfit.techniques.base import TRACE, Technique

Mixer = Attention | Latent | MLP | MoE
# Of frameworks whose code is written; torch's styles on the same layers do what transformers' own plan does.
STYLES = {
    "megatron": ("megatron",),
    "transformers": ("transformers", "dtensor"),
    "trl": ("transformers", "dtensor"),
    "torchtitan": ("dtensor",),
}
WHOLE = frozenset({"stablelm"})  # attention that reshapes to the heads of the whole model, and stops (transformers 5.23)


def apply(program: Program) -> Program:
    tp = program.strategy.tp
    assert tp is not None
    if any(True for _ in problems(program)):
        return program
    if program.engine == "gemini":
        return gemini.split(program).replace(split=True)
    model, size, alone = program.model, tp.size, program.strategy.size("ep") == 1
    ends: dict[str, Any] = {} if not tp.vocabulary else {"head": replace(model.head, outputs=model.head.outputs // size)}
    if tp.vocabulary and tabled(program):
        ends["embed"] = tuple(table(module, size) for module in model.embed)
    return program.rebuilt(lambda layer: share(layer, size, alone), **ends).replace(split=True)


def tabled(program: Program) -> bool:
    """Whether ranks share the table of tokens: transformers' own plan has it since 5.21 (distributed/mixin.py init_parallel_plans)."""
    return bool(program.engine) or program.job.version("transformers") >= UNEVEN


def share(layer: Layer, size: int, experts: bool) -> Layer:
    """A rank's part of a layer; `experts`: of each expert's matrices, too."""
    return replace(layer, blocks=tuple(replace(block, mixer=part(block.mixer, size, experts)) for block in layer.blocks))


def part(mixer: Mixer, size: int, experts: bool) -> Mixer:
    if isinstance(mixer, Latent):
        return latent(mixer, size)
    if isinstance(mixer, MoE):
        shared = None if mixer.shared is None else feed_forward(mixer.shared, size)
        return replace(mixer, shared=shared, width=mixer.width // size if experts else mixer.width)
    if isinstance(mixer, Attention):
        heads, kv = mixer.heads // size, max(1, mixer.kv_heads // size)
        outputs = (heads * mixer.head, kv * mixer.head, kv * mixer.head)
        project = tuple(replace(one, outputs=count) for one, count in zip(mixer.project, outputs, strict=True))
        return replace(mixer, heads=heads, kv_heads=kv, project=project, out=row(mixer.out, size))
    return feed_forward(mixer, size)


def feed_forward(mixer: MLP, size: int) -> MLP:
    gate = None if mixer.gate is None else column(mixer.gate, size)
    return replace(mixer, gate=gate, up=column(mixer.up, size), down=row(mixer.down, size))


def latent(mixer: Latent, size: int) -> Latent:
    """Heads are shared out; the way down to the latents stands on every rank (core/transformer/multi_latent_attention.py)."""
    q_proj, q_b = (None if one is None else column(one, size) for one in (mixer.q_proj, mixer.q_b))
    return replace(mixer, heads=mixer.heads // size, q_proj=q_proj, q_b=q_b, kv_b=column(mixer.kv_b, size), out=row(mixer.out, size))


def column(linear: Linear, size: int) -> Linear:
    return replace(linear, outputs=linear.outputs // size)


def row(linear: Linear, size: int) -> Linear:
    """The bias is added after the sum over the ranks, by each of them."""
    return replace(linear, inputs=linear.inputs // size)


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
        hint = f"there are formulas for {', '.join(sorted(STYLES))}; {TRACE}"
        yield Problem(message=f"no formula yet for tensor parallelism of {job.framework}", where="use tp", hint=hint)
        return
    if tp.style not in ("auto", *own):
        yield Problem(
            message=f"{job.framework} splits a model its own way, not `{tp.style}`",
            where="use tp.style",
            hint=f"`{own[0]}`, or leave it away",
        )
    if program.engine == "gemini":
        settings = [name for name in ("sequence", "parallel_loss") if getattr(tp, name)]
        for name in settings:
            yield Problem(message="no formula of ColossalAI's tensor parallelism has it", where=f"use tp.{name}", hint="leave it away")
        yield from gemini.unsplit(program)
        return
    if not tp.vocabulary and program.engine:
        yield Problem(message="Megatron always splits the vocabulary", where="use tp.vocabulary", hint="leave it away")
    if not program.engine:
        yield from planned(program, tp)
    yield from uneven(program, tp)


# How transformers' own plan splits the linear layers of models like Llama, by the end of their paths.
# transformers that PEFT puts adapters on split layers of (peft 0.21 tuners/lora/model.py get_tp_plan_and_mesh); whose splits may be uneven
# (`_from_local_last_dim_shard(x, mesh, module.in_features)`).
PLANNED, UNEVEN = (5, 17), (5, 21)
COLUMNS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
ROWS = frozenset({"o_proj", "down_proj"})


def cut(program: Program) -> frozenset[str]:
    """The names of the weights that every rank has a part of: what a layer split by rows adds, each adds whole."""
    model = program.model
    linears = [one for layer, _ in model.kinds for one in layer.linears()]
    names = {f"{one.name}.weight" for one in linears if one.name.rpartition(".")[2] in COLUMNS | ROWS}
    names |= {f"{one.name}.{part}" for one in linears if one.name.rpartition(".")[2] in COLUMNS for part in ("bias", "lora_B")}
    names |= {f"{one.name}.lora_A" for one in linears if one.name.rpartition(".")[2] in ROWS}
    ends = {weight.name for module in (*(model.embed if tabled(program) else ()), model.head) for weight in module.weights()}
    return frozenset(names | ends)


def planned(program: Program, tp: TP) -> Iterator[Problem]:
    """What transformers' own plan does to models like Llama, trained whole, with FSDP2 beside it or not."""
    job, model, strategy = program.job, program.model, program.strategy
    names = {linear.name.rpartition(".")[2] for layer, _ in model.kinds for linear in layer.linears()}
    norms = {mixer.q_norm.width != mixer.head for layer, _ in model.kinds for block in layer.blocks
             if isinstance(mixer := block.mixer, Attention) and mixer.q_norm is not None}  # fmt: skip
    styles = {block.mixer.style for layer, _ in model.kinds for block in layer.blocks if isinstance(block.mixer, Attention)}
    odd = (
        (tp.style == "transformers" and (tp.sequence or tp.parallel_loss), "with a split sequence or loss, which its own plan has not"),
        (
            tp.sequence
            and (
                not job.training
                or any(
                    len(layer.blocks) != 2 or layer.parallel or block.order != "pre" for layer, _ in model.kinds for block in layer.blocks
                )
            ),
            "with a split sequence",
        ),
        (tp.parallel_loss and not job.training, "with a split loss"),
        (not tp.vocabulary, "with the table and the head whole"),
        (job.version("transformers") < PLANNED, "before 5.17"),
        (model.tied and not tabled(program), "before 5.21 with a tied head"),
        (job.training and job.method == "freeze", "with parts that are frozen"),
        (job.adapters and bool(job.modules_to_save), "with modules that are trained whole beside adapters"),
        (bool(model.stored), "of packed weights"),
        (not job.training and strategy.data > 1, "beside other layouts"),
        (job.loss != "plain" or job.liger or bool(job.unsloth), "with fused kernels"),
        (
            strategy.size("cp") * strategy.size("zero") > 1 or (strategy.fsdp is None and strategy.data > 1),
            "beside other layouts than FSDP2 and pipelines",
        ),
        (
            not names <= COLUMNS | ROWS or True in norms or model.head.name != "lm_head" or bool(model.towers) or bool(styles & WHOLE),
            f"of the family `{model.family}` as it is here",
        ),
    )
    for wrong, what in odd:
        if wrong:
            yield Problem(
                message=f"no formula yet for transformers' tensor parallelism {what}",
                where="use tp",
                hint=TRACE,
            )
    yield from adapted(job, tp, targets_of(program))
    yield from masked(
        job, tp, {block.mixer.window for layer, _ in model.kinds for block in layer.blocks if isinstance(block.mixer, Attention)}
    )


def masked(job: Job, tp: TP, windows: set[int]) -> Iterator[Problem]:
    """transformers makes a mask as long as what the embedding gives, which is a part of the sequence (5.23 masking_utils.py), for both producers."""
    if tp.sequence and (job.attention == "eager" or not job.packing or any(0 < window < job.seq for window in windows)):
        message = "attention that needs a mask stops where the sequence is split: transformers makes masks for a rank's part of it"
        yield Problem(message=message, where="use tp.sequence", hint="`--attention sdpa` on packed sequences, or leave `sequence` away")


def targets_of(program: Program) -> frozenset[str]:
    """The last names of the linear layers that get adapters."""
    linears = [linear for layer, _ in program.model.kinds for linear in layer.linears()]
    return frozenset(one.name.rpartition(".")[2] for one in linears if program.adapter is not None and program.adapted(one))


def adapted(job: Job, tp: TP, targets: frozenset[str]) -> Iterator[Problem]:
    """What transformers, PEFT and bitsandbytes stop at, as their own code was seen to on two ranks, for both producers."""
    if job.quantization != "none":
        message = (
            "bitsandbytes' weights cannot be split: transformers makes DTensors of them, which lack the constants that unpack them "
            "(transformers 5.23 core_model_loading.py)"
        )
        yield Problem(message=message, where="job.quant", hint="`zero,stage=3` or `fsdp` shard packed weights")
    if not job.adapters:
        return
    if tp.style == "dtensor" or tp.sequence or tp.parallel_loss or not tp.vocabulary:
        message = "torch's styles split linear layers, not PEFT's around them; PEFT knows transformers' own plan alone"
        yield Problem(message=message, where="use tp", hint="leave the settings of `tp` away")
    if job.version("transformers") >= UNEVEN and targets & ROWS:
        message = (
            "transformers from 5.21 on takes an adapter's own width for the whole of what is split, and stops at adapters of layers split by rows: "
            + ", ".join(f"`{one}`" for one in sorted(targets & ROWS))
        )
        columns = ",".join(sorted(targets & COLUMNS)) or "q_proj,v_proj"
        yield Problem(message=message, where="job.targets", hint=f"`--targets {columns}`, or `transformers=5.20` in `versions`")


def uneven(program: Program, tp: TP) -> Iterator[Problem]:
    """Sizes that the ranks do not divide."""
    found: dict[str, int] = {}
    for layer, _ in program.model.kinds:
        for block in layer.blocks:
            mixer = block.mixer
            if isinstance(mixer, Attention):
                found |= {f"{mixer.heads} query heads": mixer.heads % tp.size}
                copied = tp.size % mixer.kv_heads if program.engine else tp.size  # Megatron has copies where there are fewer than ranks
                found |= {f"{mixer.kv_heads} key/value heads": min(mixer.kv_heads % tp.size, copied)}
                if len(mixer.project) != 3:
                    message = "queries, keys and values in one matrix are not split by any formula yet"
                    yield Problem(message=message, where="use tp", hint=TRACE)
            elif isinstance(mixer, MLP):
                found |= {f"{mixer.width} values of the feed-forward": mixer.width % tp.size}
            elif isinstance(mixer, MoE) and not program.engine and program.strategy.size("ep") > 1:
                if mixer.shared is not None:  # its layers are split by a plan of their own
                    yield Problem(
                        message="no formula yet for shared experts that are split beside others that are spread", where="use tp", hint=TRACE
                    )
            elif not program.engine:
                yield Problem(message=f"no formula yet for a split `{type(mixer).__name__}`", where="use tp")
            elif isinstance(mixer, Latent):
                found |= {f"{mixer.heads} query heads": mixer.heads % tp.size}
            else:
                found |= routed(mixer, tp, program.strategy.size("ep") == 1)
                if not tp.sequence:
                    message = "Megatron trains experts under tensor parallelism with a split sequence alone"
                    yield Problem(message=message, where="use tp.sequence", hint=f"`tp={tp.size},sequence`")
    if not program.engine:
        found |= {f"{program.model.head.outputs} rows of the vocabulary": program.model.head.outputs % tp.size}
    if tp.sequence:
        found |= {f"{program.job.seq} tokens": program.job.seq % tp.size}
    for what, rest in found.items():
        if rest:
            yield Problem(message=f"{tp.size} ranks do not divide {what}", where="use tp", hint="a size that divides all of them")


def routed(mixer: MoE, tp: TP, experts: bool) -> dict[str, int]:
    """What is left over of shared experts, and of each expert where ranks share it."""
    found = {} if mixer.shared is None else {f"{mixer.shared.width} values of the shared experts": mixer.shared.width % tp.size}
    return found | ({f"{mixer.width} values of an expert": mixer.width % tp.size} if experts else {})


TECHNIQUE = Technique(
    name="tensor parallel",
    cite="Megatron-LM core 0.16.1 tensor_parallel/layers.py, transformer/attention.py (num_query_groups_per_partition); "
    "transformers 5.23 distributed/tensor_parallel.py",
    apply=apply, check=check, layout="tp",
)  # fmt: skip
