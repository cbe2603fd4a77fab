"""An estimate as text: the verdict first, then which number is which, what fills the memory, when,
and what to mind.

Lines keep within the width, and nothing is said by colour alone.
"""

from __future__ import annotations

import dataclasses
import shlex
import textwrap
from collections.abc import Collection, Iterable, Iterator

from memfit.answers import Way
from memfit.band import COVERED
from memfit.commands import flag, gpu_words
from memfit.defaults import TRAINERS
from memfit.errors import Problem
from memfit.estimate import Answer, Estimate, Script
from memfit.hardware import Cluster, vendor_of
from memfit.job import Job
from memfit.lower.host import Host
from memfit.report.figures import KINDS, VERDICTS, bar, count, gib, percent, phase, with_unit
from memfit.report.pace import pace
from memfit.report.run import headline, whole_run_lines
from memfit.simulate.memory import Moment, Stretch
from memfit.units import GIB

COLOURS = {"fits": "32", "tight": "33", "no": "31", "error": "31", "warning": "33", "note": "36"}
WHAT = {
    "device": "device memory, as {shown_by} shows it: reserved and the {context}",
    "reserved": "held by torch's allocator: allocated, gaps and cache",
    "allocated": "live tensors at the peak",
    "usable": "what one process can use of the GPU",
    "host": "CPU memory: ",
}


def device_words(estimate: Estimate) -> str:
    """What `device` is, in the words of the GPU's vendor."""
    vendor = vendor_of(None if estimate.cluster is None else estimate.cluster.gpu)
    return WHAT["device"].format(shown_by=vendor.shown_by, context=vendor.context)


QUESTIONS = {
    "largest_batch": "largest batch that fits",
    "longest_seq": "longest sequence that fits",
    "smallest_gpu": "smallest GPU that fits",
    "cheapest_gpu": "cheapest GPU that fits",
    "cheapest_precision": "precision to go down to",
}
# The assumed options that decide most, in the order in which they are named.
DECIDE = (
    "head",
    "batch",
    "seq",
    "target_seq",
    "checkpointing",
    "precision",
    "packing",
    "optimizer",
)
OF_MODEL = {"head", "seq", "target_seq", "new_tokens"}  # assumed for a model, whatever trains it
MARGIN = 11
LISTED = 3  # files
COMMAND = "memfit estimate"
OUTER = ("fragmentation", "context", "nccl")


def text(estimate: Estimate, *, width: int = 80, colour: bool = False, exact: bool = False) -> str:
    """The full report, without a newline at its end."""
    sections = (
        verdict(estimate),
        subject(estimate),
        numbers(estimate),
        pace(estimate),
        parts(estimate, width),
        moments(estimate, width),
        whole_run_lines(estimate, width),
        ranks(estimate),
        exact_sizes(estimate) if exact else (),
    )
    lines: list[str] = []
    for section in (*sections, ladder(estimate), remarks(estimate.problems)):
        found = [folded for line in section for folded in fold(line, width)]
        lines += ["", *found] if lines and found else found
    return "\n".join(
        [paint(lines[0], estimate.verdict), *map(paint, lines[1:])] if colour else lines
    )


def verdict(estimate: Estimate) -> Iterator[str]:
    """The answer, how sure it is, and what to do next: a line each."""
    device = gib(estimate.device)
    if estimate.gpu is None or estimate.usable is None:
        yield f"needs {device} GiB of GPU memory"
        yield likely(estimate)
        if estimate.answers:
            yield from answers(estimate)
        else:
            yield "next step: add --gpu NAME for a verdict, or --smallest-gpu"
        return
    room, spare = gib(estimate.usable[0]), estimate.usable[0] - estimate.device
    name, listed = VERDICTS[estimate.verdict], estimate.gpu.id != "custom"
    each = f"each of {estimate.strategy.ranks} " if estimate.strategy.ranks > 1 else ""
    on = f" on {each}{estimate.gpu.name if listed else 'GPUs' if each else 'the GPU'}"
    if estimate.verdict == "no":
        yield f"{name}: needs {device} GiB of {room} GiB{on}"
    elif estimate.verdict == "tight":
        wants = "needs " if spare < 0 else ""
        yield f"{name}: {wants}{device} GiB of {room} GiB{on}; may run out of memory"
    else:
        yield f"{name}: {device} GiB of {room} GiB{on}, {gib(spare)} GiB headroom"
    yield likely(estimate)
    yield from headline(estimate)
    yield from answers(estimate)
    yield from next_step(estimate)
    if estimate.failure is not None:
        asked, left = with_unit(estimate.failure.asked), with_unit(estimate.failure.left)
        yield (
            f"runs out of memory {place(estimate.failure.at, estimate)}: requests "
            f"{asked}, {left} left"
        )
    if estimate.retries and (estimate.run is None or estimate.run.died is None):
        yield (
            "fits only because the allocator frees its cache and tries again, "
            f"{times(estimate.retries)}"
        )


def likely(estimate: Estimate) -> str:
    low, high = gib(estimate.band.low), gib(estimate.band.high)
    return f"likely range {low}–{high} GiB ({100 * COVERED:.0f} %)"


def next_step(estimate: Estimate) -> Iterator[str]:
    """What to type next."""
    best = estimate.next_way
    if best is not None:
        yield f"next step: {best.command}"
        yield f"  fits: {gib(best.device)} GiB ({way_words(best, estimate.job)})"
    elif estimate.verdict == "fits" and estimate.run is not None and not estimate.run.changes:
        yield "next step: add --advise to see what would change the run"
    elif estimate.verdict == "fits" and not estimate.answers and estimate.source == "formula":
        yield "next step: add --largest-batch or --longest-seq to see how far it goes"
    elif estimate.verdict == "no" and estimate.source == "bound" and estimate.cluster is not None:
        yield f"next step: memfit {gpu_words(estimate.cluster)}"
        yield "  lists the models that it can run and fine-tune"
    elif estimate.verdict in ("no", "tight") and estimate.source == "formula":
        yield "next step: memfit plan finds a layout over more GPUs; no single change is enough"


def way_words(way: Way, job: Job) -> str:
    """What a change that makes the job fit costs."""
    if way.kind == "same" and way.job.precision != job.precision:
        return f"the same work with weights in 16 bits: {way.job.precision}"
    if way.kind == "same" and way.job.optimizer != job.optimizer:
        return f"the same work with another optimizer: {way.job.optimizer}"
    return KINDS[way.kind]


def subject(estimate: Estimate) -> Iterator[str]:
    model, known = estimate.model, estimate.parameters
    active = f", {count(known.active)} active" if known.active != known.total else ""
    trained = f", {count(known.trainable)} trained" if estimate.job.training else ""
    if estimate.script is not None:
        yield f"{'script':<{MARGIN}}{script_words(estimate.script)}"
        if estimate.script.gaps:
            yield f"{'isolation':<{MARGIN}}{estimate.script.gaps}"
        if estimate.script.files:
            yield f"{'files':<{MARGIN}}{file_words(estimate.script)}"
        yield f"{'model':<{MARGIN}}{count(known.total)} parameters{trained}"
    else:
        yield f"{'model':<{MARGIN}}{model.name}: {count(known.total)} parameters{active}{trained}"
        if model.origin:
            yield f"{'from':<{MARGIN}}{model.origin}"
        yield f"{'job':<{MARGIN}}{job_words(estimate.job)}"
        if "framework" in estimate.assumed or set(estimate.assumed) & set(DECIDE):
            yield f"{'assumed':<{MARGIN}}{assumed_words(estimate.job, estimate.assumed)}"
    if estimate.script is not None and estimate.strategy.ranks > 1:
        which = f"rank {estimate.strategy.rank} of {estimate.strategy.ranks} is followed"
        yield f"{'ranks':<{MARGIN}}{which}"
    elif estimate.strategy:
        yield f"{'layout':<{MARGIN}}{layout_words(estimate)}"
    yield f"{'by':<{MARGIN}}{source_words(estimate)}"


def assumed_words(job: Job, options: Collection[str]) -> str:
    """Those of `options` that decide most, at the trainer's defaults, as the flags that change
    them."""
    named = [name for name in ("framework", "method", *DECIDE) if name in options]
    if job.method != Job.method and "method" in named:  # another option meant it: a note says which
        named.remove("method")
    words = [flag(name, getattr(job, name)) for name in named]
    if set(options) <= OF_MODEL:
        return " ".join(words)
    trainer = next(one for one in TRAINERS.values() if one.framework == job.framework)
    version = ".".join(map(str, job.version(trainer.library)))
    return f"{trainer.name} {version} defaults: {' '.join(words)}"


def layout_words(estimate: Estimate) -> str:
    """`fsdp=8, tp=2 (sequence yes) over 2 nodes of 8 GPUs`: sizes, and every setting that is not at
    its default."""
    words = []
    for name, layout in estimate.strategy.uses():
        settings = [
            (
                f"{one.name.replace('_', '-')} "
                f"{'yes' if value is True else 'no' if value is False else value}"
            )
            for one in dataclasses.fields(layout)
            if one.name != "size" and (value := getattr(layout, one.name)) != one.default
        ]
        words.append(f"{name}={layout.size}" + (f" ({', '.join(settings)})" if settings else ""))
    return ", ".join(words) + (
        "" if estimate.cluster is None else f" on {machines(estimate.cluster)}"
    )


def machines(cluster: Cluster) -> str:
    if cluster.gpus == 1:
        return "one GPU"
    return (
        f"{cluster.gpus_per_node} GPUs"
        if cluster.nodes == 1
        else f"{cluster.nodes} x {cluster.gpus_per_node} GPUs"
    )


def source_words(estimate: Estimate) -> str:
    """`a trace of the real code (torch 2.13.0)`."""
    how = {
        "formula": "formulas",
        "trace": "a trace of the real code",
        "measured": "a measured run",
        "bound": "a range over known families: its own code is not known",
    }.get(estimate.source, estimate.source)
    versions = ", ".join(f"{name} {version}" for name, version in estimate.versions.items())
    return how + (f" ({versions})" if versions else "")


def file_words(script: Script) -> str:
    """What it would have written; nothing of it is."""
    files, shown = script.files, script.files[:LISTED]
    listed = ", ".join(f"{one.path} {with_unit(one.size)}" for one in shown)
    rest = f" and {len(files) - len(shown)} more" if len(files) > len(shown) else ""
    total = with_unit(sum(one.size for one in files))
    many = "1 file" if len(files) == 1 else f"{len(files)} files"
    return f"would write {many}, {total}: {listed}{rest}"


def script_words(script: Script) -> str:
    steps = "1 optimizer step" if script.steps == 1 else f"{script.steps} optimizer steps"
    return f"{shlex.join((script.path, *script.arguments))}, followed for {steps}"


def job_words(job: Job) -> str:
    """What any reader wants to know, then every option that is not at its default."""
    kind = f"{job.task} {job.method}" if job.training else job.task
    words = [
        kind,
        job.framework,
        job.precision,
        *([job.optimizer] if job.training else []),
        f"batch {job.batch} x {job.seq} tokens",
    ]
    if not job.training and job.new_tokens:
        words.append(f"{job.new_tokens} new tokens")
    said = {"task", "method", "framework", "precision", "optimizer", "batch", "seq", "new_tokens"}
    for one in dataclasses.fields(Job):
        value = getattr(job, one.name)
        if one.name not in said and value != one.default:
            words.append(
                f"{one.name.replace('_', ' ')} "
                f"{str(value).lower() if isinstance(value, bool) else value}"
            )
    return ", ".join(words)


def numbers(estimate: Estimate) -> Iterator[str]:
    memory = estimate.memory
    yield figure(
        "device", estimate.device, device_words(estimate) + (", NCCL" if estimate.nccl.high else "")
    )
    if memory.reserved is not None:
        yield figure("reserved", memory.reserved, WHAT["reserved"])
    yield figure("allocated", memory.allocated, WHAT["allocated"])
    if estimate.usable is not None:
        yield figure("usable", estimate.usable[0], WHAT["usable"])
    yield figure("host", estimate.host.size, WHAT["host"] + host_words(estimate.host))


def host_words(host: Host) -> str:
    """What uses the CPU memory, with the total of the node where that differs."""
    return host.why + (
        f"; a node keeps {gib(host.node)} GiB there while it runs"
        if host.node and host.node != host.size
        else ""
    )


def figure(name: str, size: int, what: str) -> str:
    return f"{name:<{MARGIN}}{gib(size):>7} GiB  {what}"


def parts(estimate: Estimate, width: int) -> Iterator[str]:
    """Each part's bar begins where the one above it ends; the line is where the GPU is full."""
    whole = estimate.device
    limit = None if estimate.usable is None else estimate.usable[0]
    scale, columns = max(whole, limit or 0, 1), max(8, min(60, width - 36))
    title = "memory at the peak" + ("" if limit is None else f" (│ {gib(limit)} GiB usable)")
    yield title
    at = 0
    for name, size in large_parts(estimate).items():
        drawn = bar(at, size, scale, columns, limit)
        yield f"  {name:<14}{gib(size):>7} GiB {percent(size, whole):>5}  {drawn}".rstrip()
        at += size
    yield f"  {'= device':<14}{gib(whole):>7} GiB"


def large_parts(estimate: Estimate) -> dict[str, int]:
    """The parts in order; those that would read `<0.01` share one line after the allocated ones."""
    large: dict[str, int] = {
        name: size
        for name, size in estimate.parts.items()
        if size >= GIB // 200 or (size and name in OUTER)
    }
    small = sum(size for name, size in estimate.parts.items() if name not in large)
    outer: dict[str, int] = {name: large.pop(name) for name in OUTER if name in large}
    return {**large, **({"the rest": small} if small else {}), **outer}


def moments(estimate: Estimate, width: int) -> Iterator[str]:
    """The peak of every phase, and which one decides."""
    memory = estimate.memory
    if memory.at is None:
        return
    yield f"allocated memory peaks {place(memory.at, estimate)}"
    reserved = memory.reserved is not None
    scale, columns = max(estimate.held, 1), max(4, min(30, width - 54))
    yield f"  {'GiB':<28}{'allocated':>11}{'reserved' if reserved else '':>11}".rstrip()
    before = ""
    for stretch in merged(memory.timeline):
        name = moment_words(stretch)
        if stretch.moment == before:
            name = " " * (len(stretch.moment) + 2) + phase(stretch.phase)
        held = f"{gib(stretch.reserved):>11}" if stretch.reserved is not None else ""
        yield (
            f"  {name:<28}{gib(stretch.allocated):>11}{held}  "
            f"{bar(0, stretch.allocated, scale, columns)}"
        ).rstrip()
        before = stretch.moment


def merged(timeline: Iterable[Stretch]) -> list[Stretch]:
    """Each phase of each moment once (of all steady steps, of all tokens), with its highest
    peaks."""
    found: dict[tuple[str, str], Stretch] = {}
    for one in timeline:
        last = found.get((one.moment, one.phase), one)
        reserved = one.reserved if last.reserved is None else max(last.reserved, one.reserved or 0)
        found[one.moment, one.phase] = last._replace(
            allocated=max(last.allocated, one.allocated), reserved=reserved
        )
    return [
        one
        for name in dict.fromkeys(moment for moment, _ in found)
        for (moment, _), one in found.items()
        if moment == name
    ]


def moment_words(stretch: Stretch) -> str:
    return (
        phase(stretch.phase)
        if stretch.moment == stretch.phase
        else f"{stretch.moment}, {phase(stretch.phase)}"
    )


def exact_sizes(estimate: Estimate) -> Iterator[str]:
    """Every figure in bytes."""
    yield "bytes"
    sizes = {
        "device": estimate.device,
        "range, low": estimate.band.low,
        "range, high": estimate.band.high,
        "reserved": estimate.memory.reserved,
        "allocated": estimate.memory.allocated,
        "usable": None if estimate.usable is None else estimate.usable[0],
        "host": estimate.host.size,
        **{f"  {name}": size for name, size in estimate.parts.items()},
    }
    for name, size in sizes.items():
        if size is not None:
            yield f"  {name:<18}{size:>20,}"


def place(at: Moment, estimate: Estimate) -> str:
    """`in the first step, backward, model.layers.31.mlp (silu)`."""
    stretch = next(
        (one for one in estimate.memory.timeline if (one.phase, one.step) == (at.phase, at.step)),
        None,
    )
    name = f"in {phase(at.phase)}"
    if stretch is not None and stretch.moment != stretch.phase:
        name = f"in the {moment_words(stretch)}"
    if at.phase in ("load", "prepare"):
        name = f"while the model {'loads' if at.phase == 'load' else 'is prepared'}"
    where = f", {at.where}" if at.where else ""
    like = f", one of {at.like} alike" if at.like > 1 else ""
    return name + where + like + (f" ({at.op})" if at.op else "")


def ranks(estimate: Estimate) -> Iterator[str]:
    """Those whose memory differs, the worst marked."""
    if len(estimate.ranks) < 2:
        return
    yield f"ranks{'':<9}allocated    device"
    for one in estimate.ranks:
        name = str(one.rank) if one.alike == 1 else f"{one.rank}-{one.rank + one.alike - 1}"
        said = f"  {VERDICTS[one.verdict]}" if one.verdict in VERDICTS else ""
        worst = "  <- the worst, shown above" if one.rank == estimate.strategy.rank else ""
        yield f"  {name:<11}{gib(one.allocated):>10}{gib(one.device):>10} GiB{said}{worst}"


def answers(estimate: Estimate) -> Iterator[str]:
    for answer in estimate.answers:
        yield answer_line(answer)
        for name, found, device in answer.tried:
            yield (
                f"  {name:<28}{gib(device):>8} GiB  {VERDICTS[found]}"
                if found in VERDICTS
                else f"  {name:<28}{found}"
            )


def ladder(estimate: Estimate) -> Iterator[str]:
    """Ways to make it fit, each with its command."""
    advice = estimate.advice
    if advice is None:
        return
    if not advice.ways:
        yield (
            "fits as it is"
            if advice.helps
            else "no change that memfit knows makes it fit: use a larger GPU, or more of them"
        )
        return
    yield "ways to make it fit, best first"
    for number, one in enumerate(advice.ways, 1):
        slower = "" if one.slower is None else f", {100 * one.slower:+.0f} % time per token"
        yield f"  {number}. {KINDS[one.kind]}: {gib(one.device)} GiB{slower}"
        for rung in one.rungs if len(one.rungs) > 1 else ():
            yield f"       {rung.name}: {gib(rung.device)} GiB, {VERDICTS[rung.verdict]}"
        if one.rungs and one.rungs[-1].host is not None:
            yield f"       needs {gib(one.host)} GiB of host memory per GPU"
        yield f"     {one.command}"


def answer_line(answer: Answer) -> str:
    value = "none" if answer.value is None else str(answer.value)
    device = "" if answer.device is None else f", {gib(answer.device)} GiB"
    return f"{QUESTIONS[answer.question]}: {value}{device}" + (
        f" ({answer.limit})" if answer.limit else ""
    )


def remarks(problems: Iterable[Problem]) -> Iterator[str]:
    for problem in problems:
        where = f" @ {problem.where}" if problem.where else ""
        yield f"{problem.level}: {problem.message}{where}"
        if problem.hint:
            yield f"  hint: {problem.hint}"


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def paint(line: str, kind: str | None = None) -> str:
    """Colour for the word before the colon: of a verdict, which the caller knows, or of a level."""
    head, colon, rest = line.partition(":")
    colour = COLOURS.get(kind or head)
    return f"\x1b[{colour}m{head}\x1b[0m{colon}{rest}" if colour and colon else line


def fold(line: str, width: int) -> list[str]:
    """Long lines go on under their text; a line without a blank in the first columns has its text
    at two."""
    if len(line) <= width or "█" in line or COMMAND in line:  # a command is copied as one line
        return [line]
    indent = (
        MARGIN + 13
        if line[MARGIN : MARGIN + 13].rstrip().endswith("GiB")
        else MARGIN
        if line[:MARGIN].endswith("  ")
        else 2
    )
    return textwrap.wrap(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    ) or [line]
