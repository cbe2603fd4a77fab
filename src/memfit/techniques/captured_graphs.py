"""What captured graphs answer: training with SDPA attention, on one GPU or with data spread over
several, and generation with a growing cache. Everything else goes to the trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memfit.errors import Problem
from memfit.optimizers import OPTIMIZERS
from memfit.program import Program
from memfit.techniques.base import TRACE, Technique

if TYPE_CHECKING:
    from memfit.graph import Graph

FRAMEWORKS = ("transformers", "trl")
LAYOUTS = ("ddp", "fsdp", "zero")  # whole layers stay on every rank, or are gathered whole
SHORTEST = 8  # tokens of a prompt; convolutions over fewer than their width pad them
ATTENTION = ("sdpa", "flash", "efficient", "math", "cudnn")


def check(program: Program) -> Iterator[Problem]:
    graphs = program.model.graphs
    if graphs is None:
        return
    missing = of_chain(program) if program.model.encodes else unanswered(program)
    for what, where in missing:
        message = f"no captured graph of `{program.model.family}` {what}"
        yield Problem(message=message, where=where, hint=TRACE)
    if program.model.encodes and graphs.unknown and program.job.head == "auto":
        message = f"no captured graph of the class `{graphs.unknown[:60]}`"
        hint = "choose a class with `--head`: " + ", ".join(f"`{one}`" for one in graphs.row.heads)
        yield Problem(message=message, where="config.architectures", hint=hint)


def unanswered(program: Program) -> Iterator[tuple[str, str]]:
    """What a job asks for that was not captured, and the option that asks."""
    job, strategy = program.job, program.strategy
    if job.framework not in FRAMEWORKS:
        yield f"as `{job.framework}` runs it", "job.framework"
    if not job.training and not program.model.encodes:
        yield from of_generation(program)
    elif not program.model.encodes and setting_of(program) not in program.model.graphs.settings:
        autocast = "autocast" in setting_of(program)
        yield f"in `{job.precision}`", "job.precision" if autocast else "job.packing"
    if job.attention not in ATTENTION:
        yield f"with `{job.attention}` attention", "job.attention"
    yield from of_row(program)
    if job.liger or job.unsloth:
        yield "with other kernels", "job.liger" if job.liger else "job.unsloth"
    for name, layout in strategy.uses():
        if layout.size > 1 and name not in LAYOUTS:
            yield f"with `{name}`", f"use {name}"
    crosses = not program.model.encodes and program.model.graphs.crosses
    if job.training and job.reentrant and job.checkpointing != "none" and crosses:
        yield "with reentrant checkpoints", "job.reentrant"
    still = any(map(stands_still, graphs_of(program)))
    if job.training and strategy.size("ddp") > 1 and still:
        yield "with `ddp`, which stops at weights without a gradient", "use ddp"
    if strategy.zero is not None and strategy.zero.stage == 3:
        yield "with ZeRO-3", "use zero.stage"
    captured = tuple(int(one) for one in program.model.graphs.origin["transformers"].split(".")[:2])
    if job.version("transformers") != captured:
        version = ".".join(map(str, job.version("transformers")))
        yield f"of transformers {version}", "job.versions"


def of_row(program: Program) -> Iterator[tuple[str, str]]:
    """What a decoder's row says that it does not answer, and what matrices of an encoder's kind
    do not."""
    from memfit.model.families._captured import ROWS

    job, graphs = program.job, program.model.graphs
    if program.model.encodes:
        if graphs.transposed and (job.method != "full" or job.quantization != "none"):
            yield "with adapters or packed weights", "job.method"
        return
    row = ROWS[graphs.family]
    if job.quantization != "none" and not row.packs:
        yield "with packed weights", "job.quant"
    if job.training and job.checkpointing != "none" and not row.checkpoints:
        yield "with gradient checkpointing", "job.checkpointing"


def of_generation(program: Program) -> Iterator[tuple[str, str]]:
    """What `generate` may do that was not captured."""
    job, strategy = program.job, program.strategy
    if not {"prefill", "decode"} <= program.model.graphs.settings:
        yield "for inference", "job.task"
    if program.model.labelled is not None:
        yield "for inference with a head of labels", "job.task"
    if program.autocast:
        yield f"for inference in `{job.precision}`", "job.precision"
    if job.cache != "dynamic":
        yield f"with `cache` = {job.cache}", "job.cache"
    if job.beams > 1:
        yield "with beams", "job.beams"
    if job.new_tokens == 0:
        yield "for a single forward pass", "job.new_tokens"
    if job.logits != "last" or program.model.whole_prompt:
        yield "with the logits of the whole prompt", "job.logits"
    if job.seq < SHORTEST:
        yield f"for prompts of fewer than {SHORTEST} tokens", "job.seq"
    if job.images:
        yield "with images", "job.images"
    for name, layout in strategy.uses():
        if layout.size > 1 and name in LAYOUTS and name != "ddp":
            yield f"for inference with `{name}`", f"use {name}"


def of_chain(program: Program) -> Iterator[tuple[str, str]]:
    """The same of encoders, whose graphs have masks, autocast and forward passes."""
    job = program.job
    for what, where in unanswered(program):
        if where not in ("job.task", "job.precision", "job.packing"):
            yield what, where
    graphs = program.model.graphs
    if job.framework == "trl":
        yield f"as `{job.framework}` runs it", "job.framework"
    if graphs.row.alike.get(job.head, job.head) not in ("auto", graphs.head):
        yield f"with a head of kind `{job.head}`", "job.head"
    if not job.training:
        yield from untrained(program)
    for name, layout in program.strategy.uses():
        if layout.size > 1 and graphs.scattered:
            yield f"with `{name}`, since its layers are not separate modules", f"use {name}"
    if job.precision in graphs.row.refused:
        yield f"in `{job.precision}`", "job.precision"
    if job.training and job.checkpointing != "none" and not graphs.row.checkpoints:
        yield "with gradient checkpointing", "job.checkpointing"
    if job.keep_outputs and graphs.caches:
        yield "with a cache in the outputs", "job.keep_outputs"
    if job.target_seq and not graphs.row.pairs:
        yield "with a decoder", "job.target_seq"
    yield from too_long(program)
    if job.images:
        yield "with images", "job.images"
    if program.model.unused:
        yield from without_gradients(program)


def too_long(program: Program) -> Iterator[tuple[str, str]]:
    """Lengths that run other operations, of the usual batch and of the longest."""
    job, graphs = program.job, program.model.graphs
    if graphs.row.pairs and graphs.row.limited:  # a table ends there, or grows
        heard = graphs.row.hears and graphs.has("middle")
        for name in ("target_seq",) if heard else ("seq", "target_seq"):
            if (job.reach if name == "seq" else job.target_seq) > program.model.positions:
                yield f"for more than {program.model.positions} positions", f"job.{name}"
    longest = 0 if graphs.head in graphs.row.endless else graphs.row.longest
    for name, length in {"seq": job.seq, "longest": job.longest or job.seq}.items():
        if 0 < longest < length or not graphs.answers(job.batch, length):
            most = f" (at most {longest})" if longest else ""
            yield f"for {length} tokens{most}", f"job.{name}"
            break


def untrained(program: Program) -> Iterator[tuple[str, str]]:
    """What forward passes of encoders do that was not captured."""
    job, graphs = program.job, program.model.graphs
    if graphs.has("middle") or graphs.head == "causal-lm":
        yield "for generation", "job.task"
    if job.task in graphs.row.refused:
        yield f"for {job.task}", "job.task"
    if program.autocast:
        yield f"for inference in `{job.precision}`", "job.precision"


def without_gradients(program: Program) -> Iterator[tuple[str, str]]:
    """What treats weights without a gradient in its own way."""
    for name, layout in program.strategy.uses():
        if layout.size > 1:
            yield f"with `{name}`, where some weights get no gradient", f"use {name}"
    if program.job.training and OPTIMIZERS[program.job.optimizer].eager_states:
        yield f"with `{program.job.optimizer}`, where some weights get no gradient", "job.optimizer"


def setting_of(program: Program) -> str:
    """Which of `SETTINGS` the job runs in. Autocast over fp32 weights casts other tensors than
    over 16-bit ones."""
    wide = program.weights == "float32"
    casts = ("autocast" if wide else "half-autocast") if program.autocast else ""
    return "-".join(filter(None, (casts, "" if program.job.packing else "padded")))


def graphs_of(program: Program) -> Iterator[Graph]:
    graphs = program.model.graphs
    found = graphs.graphs if program.model.encodes else graphs.all(setting_of(program))
    return iter(found.values())


def stands_still(graph: Graph) -> bool:
    """Whether it reads weights under `no_grad`, as indexers of sparse attention do."""
    return any(
        op.attrs.get("no_grad")
        and any(isinstance(one, str) and not is_buffer(one) for one in op.inputs)
        for op in graph.ops
    )


def is_buffer(name: str) -> bool:
    """Whether this is no parameter: frequencies of rotations, corrections of routers."""
    return any(part in name for part in ("inv_freq", "correction_bias", "_buffer"))


TECHNIQUE = Technique(
    name="captured_graphs",
    order=240,
    cite="transformers 5.23, captured",
    wanted=lambda job: True,
    apply=lambda program: program,
    check=check,
)
