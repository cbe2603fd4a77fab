"""Pipeline parallelism: the layers of one stage, or of several that take turns on one rank
(interleaved); the embedding stands before the first, norm and head behind the last. Both ends have
a table of their own where the model ties them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.errors import Problem
from memfit.job import Job
from memfit.libraries.trl.check import head_of
from memfit.model.modules import Layer
from memfit.program import Chunk, Entry, Program, Stage, placed
from memfit.strategy import DEFERRED, PP, Strategy
from memfit.techniques.base import Overlay, Technique

MOST = 4096  # micro-batches in flight that are written down one by one
LOOPED = ("interleaved", "bfs", "zero-bubble", "zbv")  # schedules of several stages on a rank
PRECISIONS = ("bf16", "fp32", "autocast-bf16", "bf16-autocast")
LOSSES = (4, 49)  # transformers whose loss functions stand apart
# transformers' models of which a stage is the model without what others have: states go from layer
# to layer as they are.
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def micro_batches(pp: PP, job: Job) -> int:
    return pp.micro_batches or (job.accumulate if job.accumulate > 1 else pp.size)


def placed_at(pp: PP, number: int) -> tuple[int, ...]:
    """Which stages are a rank's: every `size`-th, or, for a V, one on the way there and one on the
    way back."""
    if pp.schedule == "zbv":
        return number, 2 * pp.size - 1 - number
    return tuple(turn * pp.size + number for turn in range(pp.virtual))


def counts(pp: PP, layers: int) -> tuple[int, ...] | None:
    """Layers of each stage, of all ranks and turns; None where the setting is no list of
    numbers."""
    total = pp.size * pp.virtual
    if not pp.stages:
        return tuple(layers // total + (stage < layers % total) for stage in range(total))
    parts = pp.stages.split("/")
    return (
        tuple(int(part) for part in parts)
        if all(part.isdecimal() and len(part) < 8 for part in parts)
        else None
    )


def alike(pp: PP, layers: int) -> tuple[int, ...]:
    """For each stage the first that takes as long: the ends have more than layers, the others as
    many layers or not."""
    each = counts(pp, layers) or ()
    keys = [
        (stage if stage in (0, pp.size - 1) else None, each[stage :: pp.size])
        for stage in range(pp.size)
    ]
    return tuple(keys.index(key) for key in keys)


def apply(program: Program) -> Program:
    pp, model = program.strategy.pp, program.model
    assert pp is not None
    if any(True for _ in problems(program)):
        return program
    number = program.strategy.rank * pp.size // program.strategy.ranks
    each = counts(pp, len(model.layers)) or ()
    compact, every = (
        any(entry.times > 1 for entry in program.entries),
        program.job.checkpoint_every if program.job.checkpointing == "every" else 1,
    )
    entries: list[Entry] = []
    chunks: list[Chunk] = []
    layers: list[Layer] = []
    for index in placed_at(pp, number):
        begin = sum(each[:index])
        own = model.layers[begin : begin + each[index]]
        fresh = placed(own, compact, every, begin) if program.entries else ()
        chunks.append(
            Chunk(len(entries), len(entries) + len(fresh), index == 0, index == len(each) - 1)
        )
        entries += fresh
        layers += own
    first, last = any(chunk.begins for chunk in chunks), any(chunk.ends for chunk in chunks)
    model = replace(
        model,
        layers=tuple(layers),
        embed=model.embed if first else (),
        towers=model.towers if first else (),
        final=model.final if last else (),
        headless=not last,
        tied=model.tied and any(chunk.begins and chunk.ends for chunk in chunks),
    )
    stage = Stage(
        number=number,
        count=pp.size,
        micro_batches=micro_batches(pp, program.job),
        chunks=tuple(chunks),
    )
    return program.replace(model=model, entries=tuple(entries), stage=stage)


def check(program: Program) -> Iterator[Problem]:
    if program.stage is None:
        yield from problems(program)
    elif program.job.method == "freeze" and not program.engine and not trains(program):
        message = (
            f"a stage has no parameters in `{program.job.trainable[:60]}`, and its "
            "optimizer fails on an empty list"
        )
        yield Problem(
            message=message,
            where="job.trainable",
            hint="choose parts that all stages have, like `norm`, or `--method lora`",
        )


def trains(program: Program) -> bool:
    """Whether this stage has any of the parts that are trained."""
    model = program.model
    ends = (*model.embed, *model.final, *(() if model.headless else (model.head,)))
    layers = (
        (weight, f"{model.prefix}.{entry.number}.{weight.name}")
        for entry in program.entries
        for weight in entry.layer.weights()
    )
    return any(program.trains(weight) for end in ends for weight in end.weights()) or any(
        program.trains(*one) for one in layers
    )


def problems(program: Program) -> Iterator[Problem]:
    pp, job = program.strategy.pp, program.job
    assert pp is not None
    if program.engine and pp.schedule not in ("1f1b", "gpipe", "interleaved"):
        message = f"not supported yet: the schedule `{pp.schedule}` of {job.framework}"
        yield Problem(
            message=message,
            where="use pp.schedule",
            hint="use `1f1b`, which keeps the same number of micro-batches",
        )
    if not program.engine:
        yield from of_torch(job, program.strategy)
        if job.hugging and program.model.family not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            yield Problem(
                message=f"not supported yet: stages of the family `{program.model.family}`",
                where="use pp",
                hint=f"one of {known}",
            )
    yield from turned(pp, job)
    yield from layered(pp, len(program.model.layers))
    if program.engine and pp.schedule == "gpipe":
        yield from countable(pp, job)
    if job.evaluate and program.engine:
        yield Problem(message="not supported yet: evaluation in a pipeline", where="job.evaluate")
    if program.model.stored or not job.training:
        yield Problem(
            message=("not supported yet: generation or GGUF weights in a pipeline"),
            where="use pp",
        )


def turned(pp: PP, job: Job) -> Iterator[Problem]:
    """Whether the schedule takes so many stages on a rank, and so many micro-batches."""
    if pp.virtual > 1 and pp.schedule not in LOOPED:
        yield Problem(
            message=f"{pp.virtual} stages per rank need an interleaved schedule",
            where="use pp.virtual",
            hint="`schedule=interleaved`",
        )
    if pp.schedule == "zbv" and pp.virtual != 2:
        yield Problem(
            message="a V schedule needs two stages per rank",
            where="use pp.virtual",
            hint="`virtual=2`",
        )
    count = micro_batches(pp, job)
    if pp.micro_batches and job.accumulate not in (1, pp.micro_batches):
        message = f"`micro_batches` is {pp.micro_batches}, but `accumulate` is {job.accumulate}"
        yield Problem(
            message=message, where="use pp.micro_batches", hint="they mean the same: remove one"
        )
    if (
        (pp.virtual > 1 and pp.schedule == "interleaved") or pp.schedule == "zero-bubble"
    ) and count % pp.size:
        message = f"{pp.size} stages do not divide {count} micro-batches"
        yield Problem(message=message, where="use pp.micro_batches", hint="interleaving needs it")


def layered(pp: PP, layers: int) -> Iterator[Problem]:
    """Whether there is a layer for every stage, and a stage for every layer."""
    each, total = counts(pp, layers), pp.size * pp.virtual
    if each is None:
        yield Problem(
            message=f"`{pp.stages[:40]}` is not a list of layers",
            where="use pp.stages",
            hint="write it like `9/10/10/3`",
        )
    elif len(each) != total or sum(each) != layers:
        message = (
            f"`stages` lists {len(each)} stages and {sum(each)} layers, but there are "
            f"{total} stages and {layers} layers"
        )
        yield Problem(message=message, where="use pp.stages", hint="give one number per stage")
    elif min(each) < 1:
        message = (
            f"{total} stages are more than {layers} layers"
            if not pp.stages
            else "a stage has no layers"
        )
        yield Problem(message=message, where="use pp", hint="every stage needs at least one layer")


def countable(pp: PP, job: Job) -> Iterator[Problem]:
    if (count := micro_batches(pp, job)) > MOST:
        message = f"not supported yet: {count} micro-batches in flight"
        yield Problem(
            message=message,
            where="use pp.micro_batches",
            hint="use `1f1b`, which keeps one per stage",
        )


def of_torch(job: Job, strategy: Strategy) -> Iterator[Problem]:
    """torch's schedules over transformers' model cut by layers, for both producers. Where a
    backward comes in two parts torch recomputes a checkpointed layer anew for each of its weights.
    """
    pp = strategy.pp
    assert pp is not None
    yield from countable(pp, job)
    yield from beside(pp, strategy)
    plain = job.packing and job.zero_grad == "after_step"
    more = job.unsloth or job.keep_outputs or job.longest or job.merge
    two = pp.schedule in DEFERRED and job.checkpointing == "selective"
    wrong = (
        (not job.hugging, f"of {job.framework}", "use pp", "use `--framework megatron`"),
        (
            not plain or bool(more),
            "other than training on packed sequences in a plain loop",
            "use pp",
            "use batches of one length, without padding",
        ),
        (
            job.precision not in PRECISIONS,
            f"in precision `{job.precision}`",
            "job.precision",
            "one of " + ", ".join(PRECISIONS),
        ),
        (
            pp.schedule == "interleaved" and pp.virtual == 1,
            "that interleaves a single stage per rank",
            "use pp.virtual",
            "`virtual=2`",
        ),
        (
            two,
            f"with `{pp.schedule}` and selective checkpointing",
            "use pp.schedule",
            "use `1f1b`, `interleaved` or `--checkpointing full`",
        ),
        (
            job.version("transformers") < LOSSES,
            "with a transformers version whose models compute the loss",
            "job.versions",
            "use 4.49 or newer",
        ),
    )
    for one, what, where, hint in wrong:
        if one:
            yield Problem(message=f"not supported yet: a pipeline {what}", where=where, hint=hint)
    if pp.schedule in DEFERRED and job.checkpointing != "none" and job.reentrant:
        message = (
            f"reentrant checkpointing fails with `{pp.schedule}`, whose backward "
            "computes only some gradients (torch 2.13 utils/checkpoint.py "
            "CheckpointFunction)"
        )
        yield Problem(message=message, where="job.reentrant", hint="remove it")
    if job.evaluate and pp.schedule == "zbv":
        message = (
            "evaluation fails with `zbv`, where a rank's stages exchange gradients "
            "without a backward (torch 2.13 distributed/pipelining/stage.py "
            "get_local_bwd_output)"
        )
        yield Problem(
            message=message,
            where="job.evaluate",
            hint="use another `schedule`, or remove `evaluate`",
        )
    own = (
        "TRL's fused head"
        if head_of(job) != "plain"
        else ""
        if job.loss == "plain"
        else f"`{job.loss}`"
    )
    if own:
        message = (
            f"the schedule computes the loss from the last stage's logits, so {own} cannot be used"
        )
        yield Problem(
            message=message,
            where="job.loss",
            hint="use `--framework transformers` and `--loss plain`",
        )


def beside(pp: PP, strategy: Strategy) -> Iterator[Problem]:
    """What torch's stages know of other layouts (torch 2.13 distributed/pipelining/stage.py
    backward_maybe_with_nosync)."""
    for name, layout in strategy.uses():
        if layout.size > 1 and name not in ("pp", "ddp", "fsdp", "tp"):
            hint = "use `ddp`, `fsdp` and `tp` with it, or `--framework megatron`"
            yield Problem(
                message=f"not supported yet: a pipeline with `{name}`", where="use pp", hint=hint
            )
    if strategy.fsdp is not None and strategy.fsdp.version == 1:
        yield Problem(
            message="torch's pipelines support FSDP2 and DDP, not FSDP1",
            where="use fsdp.version",
            hint="`version=2`",
        )
    if strategy.tp is not None and strategy.tp.sequence:
        message = "not supported yet: pipeline stages with sequence parallelism"
        yield Problem(message=message, where="use tp.sequence", hint="remove it")
    if strategy.ddp is not None and strategy.fsdp is None and pp.schedule in DEFERRED:
        message = (
            f"DDP does not see the gradients that `{pp.schedule}` accumulates, so "
            "replicas would diverge (torch 2.13 distributed/pipelining/_backward.py "
            "stage_backward_weight)"
        )
        yield Problem(
            message=message,
            where="use pp.schedule",
            hint="use `fsdp` with it, or `1f1b` or `interleaved`",
        )
    if (
        strategy.fsdp is not None
        and strategy.fsdp.version == 2
        and strategy.fsdp.reshard
        and pp.schedule in DEFERRED
    ):
        message = (
            f"`{pp.schedule}` loses the gradients of a stage that is resharded before "
            "its backward (torch 2.13 distributed/pipelining/stage.py "
            "backward_one_chunk)"
        )
        yield Problem(
            message=message,
            where="use fsdp.reshard",
            hint="use `reshard=no`, as torchtitan does in pipelines",
        )


TECHNIQUE = Technique(
    name="pipeline",
    order=130,
    cite=(
        "megatron-core 0.16.1 pipeline_parallel/schedules.py; torch 2.13 "
        "distributed/pipelining/schedules.py, stage.py"
    ),
    apply=apply,
    check=check,
    layout="pp",
    overlays=(
        Overlay(
            module="memfit.parallel.pipeline.megatron",
            applies=lambda program: program.strategy.pp is not None,
        ),
        Overlay(
            module="memfit.parallel.pipeline.stages",
            applies=lambda program: program.strategy.pp is not None,
        ),
    ),
)
