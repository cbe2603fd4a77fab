"""A model split over the GPUs of one process (`device_map="auto"`): each GPU has some of the
layers, one works while the others wait, and hidden states go from one to the next. The embedding is
the first's, norm, head and loss are the last's; what the model returns goes back to the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.errors import Problem
from memfit.job import Job
from memfit.libraries.trl.check import head_of
from memfit.model.model import Model
from memfit.model.quantized import method
from memfit.parallel.device_map.placement import (
    ON_CPU,
    ON_DISK,
    ON_GPU,
    amount_problems,
    bytes_on,
)
from memfit.parallel.device_map.placement import placed as placed_at
from memfit.parallel.device_map.shares import counts
from memfit.program import Chunk, Program, Stage, placed
from memfit.strategy import Split, Strategy, even_split
from memfit.techniques.base import Engines, Overlay, Technique
from memfit.units import GIB


def apply(program: Program) -> Program:
    split, model = program.strategy.split, program.model
    assert split is not None
    if split.offloads:
        away = any(place != ON_GPU for place in placed_at(program).values())
        if not away or any(True for _ in offload_problems(program)):
            return program
        return program.replace(engine="offload", on_cpu=bytes_on(program, ON_CPU))
    if any(True for _ in problems(program)):
        return program
    number, each = program.strategy.rank, counts(split, program) or ()
    begin = sum(each[:number])
    own, first, last = (
        model.layers[begin : begin + each[number]],
        number == 0,
        number == split.size - 1,
    )
    compact, job = any(entry.times > 1 for entry in program.entries), program.job
    entries = (
        placed(own, compact, job.checkpoint_every if job.checkpointing == "every" else 1, begin)
        if program.entries
        else ()
    )
    model = replace(
        model,
        layers=own,
        embed=model.embed if first else (),
        towers=model.towers if first else (),
        final=model.final if last else (),
        headless=not last,
    )
    chunk = Chunk(0, len(entries), first, last)
    return program.replace(
        model=model,
        entries=entries,
        stage=Stage(number=number, count=split.size, micro_batches=1, chunks=(chunk,)),
    )


def check(program: Program) -> Iterator[Problem]:
    assert program.strategy.split is not None
    if program.strategy.split.offloads:
        yield from offload_problems(program)
        yield from offload_notes(program)
    elif program.stage is None:
        yield from problems(program)


def problems(program: Program) -> Iterator[Problem]:
    split, job, model = program.strategy.split, program.job, program.model
    assert split is not None
    yield from beside(program)
    if split.gpu or split.cpu:
        yield Problem(
            message="not supported yet: weights in CPU memory or on disk beside several GPUs",
            where="use split.gpu" if split.gpu else "use split.cpu",
            hint="remove it, or use `split=1`",
        )
    for wrong, what, where, hint in unknown(job, model):
        if wrong:
            yield Problem(
                message=f"not supported yet: a model split over one process's GPUs {what}",
                where=where,
                hint=hint,
            )
    if not split.layers and job.quantization != "none":
        message = "not supported yet: accelerate's size of a quantized layer"
        yield Problem(
            message=message,
            where="use split.layers",
            hint="write the layers of each GPU, like `20/20`",
        )
        return
    each = counts(split, program)
    if each is None:
        yield Problem(
            message=f"`{split.layers[:40]}` is not a list of layers",
            where="use split.layers",
            hint="like `20/20`",
        )
    elif len(each) != split.size or sum(each) != len(model.layers):
        message = (
            f"`layers` lists {len(each)} GPUs and {sum(each)} layers, but there are "
            f"{split.size} GPUs and {len(model.layers)} layers"
        )
        yield Problem(
            message=message,
            where="use split.layers",
            hint="give one number per GPU",
        )
    elif min(each) < 1:
        yield Problem(
            message=f"every GPU needs at least one layer: {'/'.join(map(str, each))}",
            where="use split",
            hint=spread(len(model.layers), split),
        )


def spread(layers: int, split: Split) -> str:
    """What to do where a GPU has no layer."""
    if split.layers or layers < split.size:
        return "use fewer GPUs"
    return f"use fewer GPUs, or `layers={even_split(layers, split.size).layers}`"


def offload_problems(program: Program) -> Iterator[Problem]:
    """What one GPU with offloaded weights is not supported for."""
    split, job, model = program.strategy.split, program.job, program.model
    assert split is not None
    wrong = amount_problems(split)
    yield from wrong
    yield from beside(program)
    if split.layers:
        yield Problem(
            message="`layers` is for several GPUs",
            where="use split.layers",
            hint="limit the GPU with `gpu=20GiB`",
        )
    if wrong or not any(place != ON_GPU for place in placed_at(program).values()):
        return
    if job.training:
        yield Problem(
            message="transformers does not train a model with weights in CPU memory or on disk",
            where="use split",
            hint="use `--use zero=1,stage=3,offload_param=cpu`",
        )
        return
    for refused, what, where, hint in (
        (not job.hugging, f"of {job.framework}", "use split", "use `--framework transformers`"),
        (job.quantization != "none", "with packed weights", "job.quant", "remove `--quant`"),
        (bool(model.stored), "of a GGUF file", "model", "use `--engine llamacpp`"),
        (bool(model.towers), "of a model with a tower", "model", "remove `split`"),
        (
            model.labelled is not None or model.encodes,
            "of a model that generates no text",
            "job.head",
            "remove `split`",
        ),
        (bool(method(model.config)), "of a quantized checkpoint", "model", "name the 16-bit one"),
    ):
        if refused:
            yield Problem(
                message=f"not supported yet: offloaded weights {what}", where=where, hint=hint
            )


def offload_notes(program: Program) -> Iterator[Problem]:
    if program.engine != "offload":
        return
    found = placed_at(program)
    for device, where in ((ON_CPU, "in CPU memory"), (ON_DISK, "on disk")):
        paths = [path for path, place in found.items() if place == device]
        if paths:
            size = bytes_on(program, device) / GIB
            yield Problem(
                message=f"{size:.1f} GiB of weights stay {where}: "
                f"{paths[0]} to {paths[-1]}, copied to the GPU in each pass",
                where="use split",
                level="note",
            )


def beside(program: Program) -> Iterator[Problem]:
    for name, layout in program.strategy.uses():
        if name != "split" and layout.size > 1:
            message = f"a split model runs in one process, which has no ranks for `{name}`"
            yield Problem(
                message=message,
                where=f"use {name}",
                hint=f"use `split={program.strategy.ranks}` alone, or `pp`, `fsdp` or `zero`",
            )


def unknown(job: Job, model: Model) -> Iterator[tuple[bool, str, str, str]]:
    yield not job.hugging, f"of {job.framework}", "use split", "use `--framework transformers`"
    answers = job.beams > 1 or job.cache == "quantized" or job.new_tokens == 0
    yield (
        not job.training and answers,
        "with beams, a quantized cache or without new tokens",
        "job",
        "use one beam and a dynamic or static cache, and generate at least 1 token",
    )
    yield model.tied, "whose head is the embedding", "use split", "`pp`"
    yield (
        bool(model.stored),
        "whose weights are blocks of a file",
        "use split",
        "remove `split`",
    )
    yield (
        job.loss != "plain" or head_of(job) != "plain",
        "with a loss that makes no logits",
        "job.loss",
        "use `--framework transformers` and `--loss plain`",
    )
    more = job.evaluate or job.keep_outputs or bool(job.longest) or job.merge or bool(job.unsloth)
    yield (
        more,
        "other than plain training",
        "job",
        "remove `evaluate`, `merge`, `keep_outputs` and `longest`",
    )
    yield (
        job.activation_offload != "none",
        "with activation offload",
        "job.activation_offload",
        "remove it",
    )
    yield (
        bool(job.recompute_layers),
        "that checkpoints its first layers",
        "job.recompute_layers",
        "use `--checkpointing full`",
    )


def engine_for(strategy: Strategy) -> str:
    return "offload" if strategy.split is not None and strategy.split.offloads else "split"


TECHNIQUE = Technique(
    name="split",
    order=140,
    cite="accelerate 1.15 utils/modeling.py, hooks.py, big_modeling.py dispatch_model",
    apply=apply,
    check=check,
    layout="split",
    engines=Engines(
        modules={
            "split": "memfit.parallel.device_map.engine",
            "offload": "memfit.parallel.device_map.offload",
        },
        choose=engine_for,
        precedence=1,
    ),
    overlays=(
        Overlay(
            module="memfit.parallel.device_map.device_map_stage",
            applies=lambda program: (
                program.stage is not None and program.strategy.split is not None
            ),
            order=60,
        ),
    ),
)
