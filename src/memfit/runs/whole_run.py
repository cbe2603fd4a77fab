"""Memory of a whole run: thousands of steps of different lengths, replayed through the allocator,
and the probability that one runs out of memory."""

from __future__ import annotations

from typing import Annotated

from memfit.answers import Checkpoints, RunStep, Texts, WholeRun, WorstBatch
from memfit.constants import setting
from memfit.estimate import Estimate
from memfit.formats import FORMATS
from memfit.job import Job
from memfit.lower import programmed
from memfit.runs.batches import Batches, batches
from memfit.runs.changes import RARE, Setting, changes
from memfit.runs.risk import Records, Risk, checkpoints, half_of, records
from memfit.runs.walker import Given, Walker
from memfit.simulate.memory import blocks
from memfit.simulate.run import Replayed
from memfit.simulate.settings import Settings
from memfit.tape import PARTS

RARELY: Annotated[float, setting("share of texts up to the length that is shown as p99")] = 0.99


def whole_run(found: Estimate, job: Job, given: Given) -> WholeRun:
    """`found`: the estimate of the run's usual and longest batch, on the rank that needs the most;
    `job` has the length at which texts are cut."""
    walker = Walker(found, job, given.top, given.sampling.multiple)
    settings = Settings.parse(job.alloc_conf, where="job.alloc_conf")
    made = batches(given.lengths.tokens, given.sampling, given.count, given.seed)
    course = walker.course(made, given.evaluate_every)
    free, limited = walker.replay(course, settings), None
    risk: Risk | None = None
    orders: Records = ()
    by: list[float] = []
    if found.usable is not None:
        room = max(0, found.usable[0] - found.outside)
        limited = walker.replay(course, settings, room) if free.reserved > room else None
        orders = records(given)
        risk = Risk(walker, settings, usual(made), course)
        by = risk.by(orders, given.count)
    seconds = walker.total_seconds(made, given.sampling.ranks)
    setting = Setting(
        walker=walker, given=given, made=made, risk=risk, orders=orders, seconds=seconds
    )
    died = limited is not None and limited.died is not None
    wanted = given.compared or died or (by and by[-1] > RARE)
    return WholeRun(
        texts=texts_of(given),
        order=given.sampling.order,
        seed=given.seed,
        epoch=given.epoch,
        steps=tuple(
            RunStep(step=number, tokens=longest, allocated=one.allocated, reserved=one.reserved)
            for number, (one, longest) in enumerate(zip(free.steps, made.longest, strict=True))
        ),
        worst=worst_of(made, free, given, walker),
        evaluation=None if free.evaluation is None else free.evaluation.allocated,
        reserved=free.reserved,
        allocated=free.allocated,
        probability=by[-1] if by else None,
        by=tuple((step, by[step - 1]) for step in checkpoints(given.count)) if by else (),
        half=half_of(by),
        orders=len(orders),
        died=None if limited is None else limited.died,
        died_in="" if limited is None else limited.died_in,
        retries=0 if limited is None else limited.retries,
        squeezed=None if limited is None or limited.died is not None else limited.reserved,
        padding=made.padding,
        seconds=seconds,
        tokens_per_second=None if not seconds else made.real / seconds,
        replays=free.replays,
        changes=tuple(changes(setting, settings)) if wanted else (),
        checkpoints=saved(found, job, given),
    )


def saved(found: Estimate, job: Job, given: Given) -> Checkpoints | None:
    """The trained weights and the states that are alive when a step is over (transformers 5.23
    trainer.py _save_checkpoint)."""
    if any(layout.sharded for _, layout in found.strategy.uses()):
        return None
    tape = found.memory.tape
    sizes: dict[str, int] = dict.fromkeys(PARTS, 0)
    for part, block, times in blocks(tape, len(tape.events) - 1):
        sizes[part] += block.size * times
    weights = sizes["weights"]
    if job.method != "full":
        program = programmed(found.model, job, found.cluster, found.strategy, True)
        stored = program.weights if program.adapter is None else program.adapter.format
        weights = found.parameters.trainable * FORMATS[stored].block_bytes
    every = given.save_every or given.count
    return Checkpoints(
        count=max(1, given.count // every),
        weights=weights,
        states=sizes["optimizer"] + sizes["master"],
    )


def usual(made: Batches) -> int:
    """The middle one of the longest batches of each step."""
    return sorted(made.longest)[len(made.longest) // 2]


def texts_of(given: Given) -> Texts:
    lengths, limit = given.lengths, given.sampling.limit
    return Texts(
        origin=lengths.origin,
        total=lengths.total,
        mean=lengths.mean,
        median=lengths.quantile(0.5),
        p99=lengths.quantile(RARELY),
        longest=lengths.longest,
        limit=limit,
        cut=sum(one > limit for one in lengths.tokens) / len(lengths.tokens),
        empty=lengths.empty,
    )


def worst_of(made: Batches, free: Replayed, given: Given, walker: Walker) -> WorstBatch:
    step = max(range(len(made.longest)), key=made.longest.__getitem__)
    text, lines = made.texts[step], given.lengths.lines
    one, several = free.steps[step].allocated, given.sampling.ranks > 1
    return WorstBatch(
        step=step,
        tokens=made.longest[step],
        line=lines[text] if lines and text >= 0 else 0,
        allocated=round(walker.live(made.longest[step])) if several else one,
    )
