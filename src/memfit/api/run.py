"""Questions about a whole run: reads the lengths of its texts and adds the run to the answer."""

from __future__ import annotations

import dataclasses
import os
import shlex
from typing import TYPE_CHECKING, Any

from memfit.defaults import trainer_default
from memfit.errors import InputError, Problem
from memfit.job import Job
from memfit.spellings import switched
from memfit.strategy import Strategy
from memfit.words.options import Ask
from memfit.words.read import gather, read_into

if TYPE_CHECKING:
    from memfit.estimate import Estimate
    from memfit.runs.lengths import Lengths
    from memfit.runs.walker import Given
    from memfit.simulate.time import Duration

# Options that say something of a run alone.
OF_A_RUN = (
    "steps",
    "seed",
    "order",
    "pad_to_multiple",
    "tokenizer",
    "tokens_per_char",
    "text_key",
    "evaluate_every",
    "save_every",
)
CERTAIN = (
    0.95  # of a verdict, as of the likely range: nine tenths lie within, half of the rest above
)


def run_of(
    ask: Ask, job: Job, strategy: Strategy, subject: Any, problems: list[Problem]
) -> tuple[Job, Given | None]:
    """The job with the usual and the longest batch of the run, and the run itself."""
    if not ask.lengths:
        problems += lonely(ask)
        return job, None
    problems += misfits(ask, job, strategy)
    from memfit.runs.batches import Sampling, batches
    from memfit.runs.walker import Given

    lengths = gather(problems, lambda: None, lambda: read_lengths_of(ask, subject))
    if lengths is None:
        return job, None
    parts = strategy.size("tp") * strategy.size("cp") * strategy.size("pp")
    sampling = Sampling(
        batch=job.batch,
        limit=job.seq,
        accumulate=job.accumulate,
        ranks=max(1, strategy.ranks // parts),
        order=ask.order,
        multiple=ask.pad_to_multiple,
        packing=job.packing,
    )
    given = Given(
        lengths=lengths,
        sampling=sampling,
        steps=ask.steps,
        seed=ask.seed,
        evaluate_every=ask.evaluate_every,
        save_every=ask.save_every,
        compared=ask.advise,
    )
    padded = sorted(batches(lengths.tokens, sampling, given.count, ask.seed).longest)
    usual, longest = padded[len(padded) // 2], padded[-1]
    return dataclasses.replace(job, seq=usual, longest=longest if longest > usual else 0), given


OF_A_PLAN = tuple(
    name for name in OF_A_RUN if name not in ("steps", "evaluate_every", "save_every")
)
SEEN = 200  # steps whose batches decide for a plan


def planned_over_lengths(
    values: dict[str, Any], subject: Any, problems: list[Problem]
) -> dict[str, Any]:
    """The options of a plan with the length that decides: `seq` is the longest batch, which must
    fit, and the dataset has as many tokens as its padded texts."""
    named = {name: values[name] for name in ("lengths", *OF_A_PLAN) if name in values}
    rest = {name: value for name, value in values.items() if name not in named}
    ask = read_into(Ask, named, problems)
    if not ask.lengths:
        problems += lonely(ask)
        return rest
    if str(values.get("task", "")) == "inference":
        problems += misfits(ask, Job(task="inference"), Strategy())
    from memfit.runs.batches import Sampling, batches, epoch_steps

    limit, batch = (
        first_number(values.get(name), int((trainer_default(name) or ("", 1))[1]))
        for name in ("seq", "batch")
    )
    found = gather(problems, lambda: None, lambda: read_lengths_of(ask, subject))
    if found is None:
        return rest
    packing = switched(str(values.get("packing")).partition(",")[0]) is True
    sampling = Sampling(
        batch=batch,
        limit=limit,
        order=ask.order,
        multiple=ask.pad_to_multiple,
        packing=packing,
    )
    steps = min(SEEN, epoch_steps(found.tokens, sampling, found.total))
    made = batches(found.tokens, sampling, steps, ask.seed)
    rest["seq"] = str(max(made.longest))
    if not rest.get("dataset_tokens") and not rest.get("examples"):
        real = sum(min(one, limit) for one in found.tokens) * found.total / len(found.tokens)
        rest["dataset_tokens"] = str(round(real / (1 - made.padding)))
    return rest


def first_number(value: Any, otherwise: int) -> int:
    """Of several values the first; what is no number is reported elsewhere."""
    text = str(value).partition(",")[0].strip()
    return max(1, int(text)) if text.isdigit() else otherwise


def read_lengths_of(ask: Ask, subject: Any) -> Lengths:
    from memfit.runs.lengths import read_lengths
    from memfit.runs.texts import Counting

    counting = Counting(
        tokenizer=ask.tokenizer,
        tokens_per_char=ask.tokens_per_char,
        column=ask.text_key,
        model=os.fspath(subject) if isinstance(subject, (str, os.PathLike)) else "",
    )
    return read_lengths(ask.lengths, counting, examples=ask.examples, seed=ask.seed)


def lonely(ask: Ask) -> list[Problem]:
    """Options that need the lengths."""
    return [
        Problem(
            message=f"`{name.replace('_', '-')}` needs `--lengths`",
            where=name,
            hint="name the texts' lengths, like `--lengths data.jsonl`",
        )
        for name in OF_A_RUN
        if getattr(ask, name) != getattr(Ask, name)
    ]


def misfits(ask: Ask, job: Job, strategy: Strategy) -> list[Problem]:
    """What a run over lengths does not go with."""
    chunks = 2 * strategy.size("cp")  # of each sequence
    found: list[tuple[bool, str, str, str]] = [
        (
            not job.training,
            "`lengths` applies to training only",
            "job.task",
            "use `--task finetune` or `pretrain`",
        ),
        (
            ask.by == "trace",
            "a trace does not replay a run over `lengths`",
            "by",
            "use `--by formula`",
        ),
        (
            job.longest > 0,
            "`longest` and `lengths` both set the longest batch",
            "longest",
            "remove `longest`: the lengths have it",
        ),
        (
            ask.evaluate_every > 0 and not job.evaluate,
            "`evaluate-every` needs `--evaluate`",
            "evaluate_every",
            "add `--evaluate`, and `--eval-batch` for its size",
        ),
        (
            chunks > 2 and ask.pad_to_multiple % chunks > 0,
            f"context parallelism needs batches of a multiple of {chunks} tokens",
            "pad_to_multiple",
            f"add `--pad-to-multiple {chunks}`",
        ),
        (
            strategy.size("pp") > 1,
            "a run over `lengths` is not supported yet with pipeline parallelism",
            "use",
            "remove `pp`, or use `--seq` with the longest batch",
        ),
        (
            bool(ask.tokenizer) and bool(ask.tokens_per_char),
            "`tokenizer` and `tokens-per-char` both count tokens",
            "tokenizer",
            "keep one of them",
        ),
    ]
    return [
        Problem(message=message, where=where, hint=hint)
        for wrong, message, where, hint in found
        if wrong
    ]


def worst_job(job: Job, given: Given | None) -> Job:
    """What advice is for: steps that are all as long as the longest one."""
    return job if given is None else dataclasses.replace(job, seq=job.longest or job.seq, longest=0)


def command_job(way: Job, job: Job, given: Given | None) -> Job:
    """The job as a command: `seq` is the length at which texts are truncated, unless the way
    shortens them."""
    if given is None or way.seq != (job.longest or job.seq):
        return way
    return dataclasses.replace(way, seq=given.sampling.limit)


def run_flags(ask: Ask) -> str:
    """The options of the run, as they are typed."""
    words = [
        f" --{name.replace('_', '-')} {shlex.quote(str(getattr(ask, name)))}"
        for name in ("lengths", *OF_A_RUN, "examples")
        if getattr(ask, name) != getattr(Ask, name)
    ]
    return "".join(words) if ask.lengths else ""


def paid_by_run(found: Estimate, given: Given, ask: Ask) -> tuple[Duration | None, int]:
    """The mean step of the run, of tokens that are no padding, and the tokens of the dataset."""
    from memfit.runs.batches import epoch_steps

    run, time = found.run, found.time
    if run is None or time is None or run.seconds is None or run.tokens_per_second is None:
        return None, 0
    seconds = run.seconds / len(run.steps)
    mean = dataclasses.replace(
        time, seconds=seconds, tokens=max(1, round(run.tokens_per_second * seconds))
    )
    if ask.dataset_tokens:
        return mean, int(ask.dataset_tokens)
    steps = epoch_steps(given.lengths.tokens, given.sampling, ask.examples)
    return mean, steps * mean.tokens


def with_run(found: Estimate, job: Job, given: Given) -> Estimate:
    """The answer for a whole run: reserved memory at its end, and the verdict by the probability of
    running out of memory."""
    from memfit.estimate import band_of_replayed
    from memfit.runs.whole_run import whole_run

    if found.source != "formula":
        raise InputError.one(
            "a run over `lengths` needs formulas, which this model does not have",
            where="lengths",
            hint="use `--seq` with the longest batch",
        )
    cut = dataclasses.replace(job, seq=given.sampling.limit, longest=0)
    run = whole_run(found, cut, given)
    held = max(found.memory.allocated, run.reserved if run.squeezed is None else run.squeezed)
    memory = dataclasses.replace(found.memory, reserved=held)
    verdict = found.verdict
    if run.probability is not None:
        verdict = (
            "no"
            if run.probability >= CERTAIN
            else "tight"
            if run.probability > 1 - CERTAIN
            else "fits"
        )
    if run.died is not None and verdict == "fits":
        verdict = "tight"  # whatever the other orders do, the replayed one does not go through
    return dataclasses.replace(
        found,
        run=run,
        memory=memory,
        verdict=verdict,
        retries=run.retries,
        squeezed=run.squeezed,
        failure=found.failure if run.died is not None else None,
        band=band_of_replayed(found, memory),
    )
