"""Whose modelling code runs: what each framework other than transformers has formulas for, and how
its own LoRA keeps adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated

from memfit.constants import counted
from memfit.errors import Problem
from memfit.job import CHECKPOINTING, PRECISIONS, Job
from memfit.lazy_dataclass import dataclass
from memfit.model.modules import Embedding, Layer, MoE, Weight
from memfit.optimizers import OPTIMIZERS
from memfit.program import Program, Quant
from memfit.registry import nearest
from memfit.techniques.base import Engines, Technique, names


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """`families`: those whose structure its modules run; `joined`: of them, those whose checkpoints
    hold queries, keys and values in one matrix, while its adapters are three; `checkpointing`: what
    its own scripts can do on one GPU; `unties`: a tied head is loaded as a matrix of its own;
    `master`: 16-bit weights always have fp32 copies, and `told` says so where the job did not;
    `generates`, `packs`: there are formulas for its own generation, and for its linear layers in 4
    or 8 bits; `one_cache`: that generation has one cache, whatever the job says."""

    families: frozenset[str]
    losses: frozenset[str]
    methods: frozenset[str] = frozenset({"full", "lora"})
    attention: frozenset[str] = frozenset({"sdpa", "flash", "math", "efficient", "cudnn"})
    checkpointing: frozenset[str] = frozenset(CHECKPOINTING)
    joined: frozenset[str] = frozenset()
    precisions: frozenset[str] = frozenset(PRECISIONS)
    optimizers: frozenset[str] = frozenset(OPTIMIZERS)
    unties: bool = False
    master: bool = False
    generates: bool = False
    one_cache: bool = False
    packs: bool = False
    told: str = ""
    stacks: bool = False  # experts as torchtitan keeps them
    # the vocabulary is padded to a multiple of so many rows on every rank of tensor parallelism
    padded: int = 0
    engine: str = ""  # its own data parallelism, if it has one
    products: str = ""  # whose products it runs, where those have rates of their own
    cite: str = ""


PLAIN = frozenset({"plain"})
NOTHING = Facts(families=frozenset(), losses=frozenset())
FACTS: dict[str, Facts] = {
    "torchtune": Facts(
        families=frozenset({"llama", "mistral", "qwen2"}),
        losses=frozenset({"plain", "chunked"}),
        checkpointing=frozenset({"none", "full", "every"}),
        cite="torchtune 0.6.1 models/",
    ),
    "torchtitan": Facts(
        families=frozenset({"llama", "qwen3", "qwen3_moe"}),
        losses=frozenset({"plain", "chunked"}),
        stacks=True,
        methods=frozenset({"full"}),
        attention=frozenset({"sdpa", "flash", "math", "cudnn"}),
        cite="torchtitan 0.3.0 models/",
    ),
    "litgpt": Facts(
        families=frozenset(
            {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "falcon", "phi", "gpt_neox"}
        ),
        losses=PLAIN,
        unties=True,
        methods=frozenset({"full", "lora", "qlora"}),
        checkpointing=frozenset({"none"}),
        joined=frozenset({"falcon", "gpt_neox"}),
        generates=True,
        one_cache=True,
        packs=True,
        cite="litgpt 0.5.13 config.py, finetune/full.py setup, generate/base.py main",
    ),
    "megatron": Facts(
        families=frozenset(
            {
                "llama",
                "mistral",
                "qwen2",
                "qwen3",
                "mixtral",
                "qwen2_moe",
                "qwen3_moe",
                "deepseek_v2",
                "deepseek_v3",
            }
        ),
        losses=frozenset({"plain", "te"}),
        methods=frozenset({"full"}),
        padded=128,
        attention=frozenset({"sdpa", "flash-attn-2", "cudnn"}),
        checkpointing=frozenset({"none", "full", "selective"}),
        precisions=frozenset({"bf16", "bf16-master"}),
        optimizers=frozenset({"adamw", "adamw_fused", "adam", "adam_fused", "sgd", "sgd_momentum"}),
        master=True,
        engine="megatron",
        products="te",
        told=(
            "Megatron's bf16 keeps fp32 master weights and gradients (18 bytes per "
            "parameter with Adam)"
        ),
        cite="megatron-core 0.16.1 models/gpt, TransformerEngine 2.18",
    ),
}


def apply(program: Program) -> Program:
    """torchtune's and litgpt's adapters have the dtype of the weights (torchtune
    modules/peft/lora.py, litgpt lora.py); Megatron's --bf16 keeps fp32 copies
    (core/optimizer/optimizer.py Float16OptimizerWithFloat16Params)."""
    facts = FACTS[program.job.framework]
    if facts.engine:
        dense, experts = shares(program)
        program = program.replace(engine=facts.engine, shares=dense, expert_shares=experts)
    if facts.master:
        program = program.replace(master=True)
    if program.adapter is not None:
        program = program.replace(
            adapter=dataclasses.replace(program.adapter, format=program.weights),
            input_gradients=False,
        )
    if facts.unties and program.model.tied:
        program = program.replace(model=dataclasses.replace(program.model, tied=False))
    if facts.stacks:
        program = program.rebuilt(stacked)
    if facts.packs and program.quant is not None:
        program = program.replace(quant=packed(program, program.quant))
    return padded(program, facts.padded * program.strategy.size("tp")) if facts.padded else program


def facts_of(framework: str) -> Facts:
    """Of transformers and TRL, whose code all the rest is written for, nothing."""
    return FACTS.get(framework, NOTHING)


def stacked(layer: Layer) -> Layer:
    """Experts as torchtitan keeps them: three stacks, weights of the chosen ones divided by their
    sum (models/qwen3/__init__.py), and for each expert a bias that steers the choice and a count,
    in fp32 (models/common/moe.py, `load_balance_coeff`, which its recipes leave on)."""
    blocks = []
    for block in layer.blocks:
        mixer = block.mixer
        if isinstance(mixer, MoE):
            names = [f"{mixer.name}.{name}" for name in ("expert_bias", "tokens_per_expert")]
            buffers = tuple(
                Weight(name=name, shape=(mixer.experts,), role="buffer", format="float32")
                for name in names
            )
            block = dataclasses.replace(
                block, mixer=dataclasses.replace(mixer, apart=True, normed=True, extra=buffers)
            )
        blocks.append(block)
    return dataclasses.replace(layer, blocks=tuple(blocks))


def shares(program: Program) -> tuple[int, int]:
    """Megatron's distributed optimizer shares fp32 copies and states out among the replicas and the
    ranks of context parallelism; those of experts, which have buffers of their own, among the ranks
    that hold the same ones (megatron-core 0.16.1 optimizer/distrib_optimizer.py,
    distributed/distributed_data_parallel.py)."""
    ddp, strategy = program.strategy.ddp, program.strategy
    return (
        (ddp.size * strategy.size("cp"), max(1, strategy.expert_data))
        if ddp is not None and ddp.distributed
        else (1, 1)
    )


def padded(program: Program, rows: int) -> Program:
    """More rows for the table and the head, so that `rows` divides them
    (megatron/training/tokenizer vocab_size_with_padding, --make-vocab-size-divisible-by 128)."""
    model = program.model
    token = model.embed[0] if model.embed else None
    if not isinstance(token, Embedding) or model.head.outputs % rows == 0:
        return program
    size = -(-model.head.outputs // rows) * rows
    embed = (dataclasses.replace(token, rows=size), *model.embed[1:])
    return program.replace(
        model=dataclasses.replace(
            model, embed=embed, head=dataclasses.replace(model.head, outputs=size)
        )
    )


def packed(program: Program, quant: Quant) -> Quant:
    """Every linear layer, the head too, from fp16 whatever it comes in; nothing is cast up for
    training (lightning 2.6 fabric/plugins/precision/bitsandbytes.py)."""
    return dataclasses.replace(
        quant, skip=names(program.job.quant_skip), prepared=False, narrowed=(), again="float16"
    )


def check(program: Program) -> Iterator[Problem]:
    job, name = program.job, program.job.framework
    facts = FACTS[name]
    other = "`--framework transformers` supports more families"
    if not job.training and not facts.generates:
        yield Problem(
            message=f"not supported yet: generation with {name}", where="job.framework", hint=other
        )
    elif not job.training:
        yield from generation(job)
    if program.model.family not in facts.families:
        known = ", ".join(sorted(facts.families))
        message = f"not supported yet: {name} with the family `{program.model.family}`"
        yield Problem(message=message, where="job.framework", hint=f"supported: {known}; {other}")
    if job.training and job.method not in facts.methods:
        yield Problem(
            message=f"not supported yet: method `{job.method}` with {name}",
            where="job.method",
            hint=f"one of {', '.join(sorted(facts.methods))}",
        )
    elif job.quantization != "none" and not facts.packs:
        yield Problem(
            message=f"not supported yet: quantized weights with {name}",
            where="job.quant",
            hint=other,
        )
    elif job.quantization != "none":
        yield from packing(job)
    chosen = (
        ("loss", job.loss, facts.losses),
        ("attention", job.attention, facts.attention),
        ("checkpointing", job.checkpointing, facts.checkpointing),
        ("precision", job.precision, facts.precisions),
        ("optimizer", job.optimizer, facts.optimizers),
    )
    for field, value, allowed in chosen:
        if value not in allowed:
            close = nearest(value, sorted(allowed)) or sorted(allowed)
            yield Problem(
                message=f"{name} does not support {field} `{value}`",
                where=f"job.{field}",
                hint=f"one of {', '.join(close)}",
            )
    if facts.stacks:
        yield from rows_apart(program)
    if facts.told and job.precision == "bf16":
        yield Problem(
            message=facts.told,
            where="job.precision",
            level="note",
            hint="`bf16-master` says the same",
        )
    for layout in ("fsdp", "zero") if facts.engine else ():
        if program.strategy.size(layout) > 1:
            message = f"{name} has its own data parallelism and does not support `{layout}`"
            yield Problem(
                message=message,
                where=f"use {layout}",
                hint="use `ddp=8,distributed` to shard states and master weights",
            )
    for field, used in (("liger", job.liger), ("unsloth", bool(getattr(job, "unsloth", "")))):
        if used:
            yield Problem(
                message=f"these kernels replace transformers' code, not {name}'s",
                where=f"job.{field}",
            )


def rows_apart(program: Program) -> Iterator[Problem]:
    """Where more ranks shard experts than there are, torchtitan cuts their rows
    (distributed/fsdp.py, `Shard(1)`), not the stacks; and what its tensor parallelism does around
    experts is not written."""
    strategy = program.strategy
    mixers = program.model.mixtures
    if strategy.fsdp is not None and any(strategy.shards > one.experts for one in mixers):
        message = f"not supported yet: {strategy.shards} ranks for fewer experts in torchtitan"
        yield Problem(
            message=message,
            where="use fsdp",
            hint="use `ddp` for replicas, and at most one `fsdp` rank per expert",
        )
    if mixers and program.job.checkpointing == "selective":
        message = "not supported yet: torchtitan's selective checkpointing of experts"
        yield Problem(message=message, where="job.checkpointing", hint="use `full` or `none`")
    beside = [name for name in ("tp", "cp", "pp") if strategy.size(name) > 1]
    if mixers and beside:
        yield Problem(
            message=f"not supported yet: torchtitan's experts with `{beside[0]}`",
            where=f"use {beside[0]}",
            hint="use `fsdp` and `ep`",
        )


def generation(job: Job) -> Iterator[Problem]:
    """What litgpt's generate/base.py does not do."""
    if job.new_tokens == 0:
        yield Problem(
            message="litgpt generates at least 1 token",
            where="job.new_tokens",
            hint="use `--new-tokens 1` or more",
        )
    if job.beams > 1:
        yield Problem(message="litgpt does not support beam search", where="job.beams", hint="1")


def packing(job: Job) -> Iterator[Problem]:
    """What litgpt's scripts refuse over packed weights, and what has no formula (finetune/lora.py
    setup, main)."""
    if job.precision not in ("bf16", "fp16", "fp32"):
        message = f"litgpt does not quantize under `{job.precision}`"
        yield Problem(message=message, where="job.precision", hint="use `bf16` or `fp16`")
    if job.quantization == "int8" and (job.training or job.precision != "fp16"):
        message = "litgpt's int8 supports generation in fp16 only"
        yield Problem(
            message=message,
            where="job.quant",
            hint="use `--precision fp16 --task inference`, or `--quant nf4`",
        )
    if job.training and job.optimizer != "paged_adamw":
        message = "litgpt trains quantized models with bitsandbytes' PagedAdamW only"
        yield Problem(message=message, where="job.optimizer", hint="use `paged_adamw`")
    if job.training and job.version("litgpt") >= STABLE:
        message = "not supported yet: litgpt 0.5's embedding with quantized weights"
        yield Problem(
            message=message,
            where="job.versions",
            hint="use `--versions litgpt=0.4,bitsandbytes=0.42`",
        )


STABLE: Annotated[
    tuple[int, int],
    counted(
        "the first version of litgpt with bitsandbytes' StableEmbedding",
        "litgpt 0.5 finetune/lora.py main, October 2024",
    ),
] = (0, 5)
TECHNIQUE = Technique(
    name="framework",
    order=90,
    cite="the sources of each framework, in FACTS",
    wanted=lambda job: job.framework in FACTS,
    apply=apply,
    check=check,
    engines=Engines(
        modules={"megatron": "memfit.libraries.megatron.distributed_optimizer"},
        choose=lambda strategy: "base",
        precedence=6,
    ),
)
