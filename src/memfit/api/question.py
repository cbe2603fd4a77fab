"""From an option's text to a question: the model, the job, the GPUs and how they share it."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memfit import trace_fallback
from memfit.api.engine import of_an_engine
from memfit.api.run import run_of
from memfit.api.serving import shared_by_default
from memfit.defaults import TRAINERS, assumed, implied_method, without_ligers_loss
from memfit.errors import InputError, Problem
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.model.heads import with_head
from memfit.option_values import unknown
from memfit.strategy import ONE, Strategy
from memfit.words.gpus import cluster_of, gpu_notes
from memfit.words.job_files import given_values
from memfit.words.models import model_of, traced, unbuilt
from memfit.words.options import Ask, options
from memfit.words.read import ask_from, gather, job_of, strategy_of

if TYPE_CHECKING:  # each verb imports what it needs, and no more
    from memfit.hardware import Cluster
    from memfit.model.model import Model
    from memfit.model.source import Source
    from memfit.runs.walker import Given

TRACED_TOKENS = 2**26  # half a GiB of token ids, a few times over


@dataclass(frozen=True, kw_only=True)
class Question:
    model: Model
    job: Job
    cluster: Cluster | None
    strategy: Strategy
    ask: Ask
    source: Source | None
    assumed: Mapping[str, Any]  # options that nobody named, as the trainer has them
    subject: str = ""  # the model as it was named
    place: str = ""  # the GPU as it was named, as flags
    notes: tuple[Problem, ...] = ()  # what was assumed about the names as typed
    reasons: tuple[Problem, ...] = ()  # why no formulas answer it, where a trace does
    run: Given | None = None  # over real lengths; `job` has its usual and its longest batch


def question(model: Any, given: Mapping[str, Any], problems: list[Problem]) -> Question:
    """Read and check the arguments of a question. `problems`: those found before."""
    known = options()
    subject, values = given_values(model, given, known, problems)
    problems += strangers(values, known)
    asked = {
        name: value
        for name, value in values.items()
        if name in Ask.__dataclass_fields__ and name != "model"
    }
    ask = ask_from(asked, problems)
    later: list[Problem] = []  # about the place and the model: reported after the job's
    cluster = gather(later, lambda: None, lambda: cluster_of(ask.gpu, ask.memory))
    strategy = gather(later, Strategy, lambda: strategy_of(ask.use, cluster))
    reasons: list[Problem] = []
    source, built = (
        (None, None)
        if subject is None
        else gather(later, lambda: (None, None), lambda: model_of(subject, ask, reasons))
    )
    named = {name: value for name, value in values.items() if name in Job.__dataclass_fields__}
    usual = assumed(
        named,
        {} if built is None else built.config,
        frozenset(name for name, _ in strategy.uses()),
        "bf16" if cluster is None else cluster.gpu.half,
    )
    named = without_ligers_loss(named, str({**usual, **named}.get("framework", "")))
    job = job_of({**usual, **named}, problems)
    job, run = run_of(ask, job, strategy, subject, problems)
    if built is not None and built.layers:
        built = with_head(built, job.head, job.labels)
    problems += [one for one in later if one not in problems]
    layout: Problem | None = None
    several = cluster is not None and cluster.gpus > 1 and not ask.use.strip()
    if several and job.task == "inference" and built is not None and cluster is not None:
        cluster, strategy, layout = shared_by_default(built, job, cluster)
    if built is not None and built.layers:
        wrong: list[Problem] = []
        whole = built
        gather(wrong, lambda: None, lambda: applied(whole, job, cluster, strategy))
        problems += [problem for problem in wrong if ask.by == "formula" or not traced(problem)]
        if ask.by != "formula" and any(map(traced, wrong)):
            reasons += filter(traced, wrong)
            built = unbuilt(built.config, built.name, built.origin)
    if reasons and ask.by == "auto":
        ask, reasons, lacking = without_formula(ask, reasons, built, source)
        problems += lacking
        if built is not None and "seq" not in named:
            job = trace_fallback.within_positions(job, built.config)
    else:
        reasons = []
    problems += conflicts(ask, job, values)
    if problems or built is None:
        raise InputError(*problems)
    return Question(
        model=built,
        job=job,
        cluster=cluster,
        strategy=strategy,
        ask=ask,
        source=source,
        assumed=usual,
        subject=os.fspath(subject) if isinstance(subject, (str, os.PathLike)) else built.name,
        place=named_place(ask),
        notes=(
            *gpu_notes(ask.gpu),
            *stored_notes(usual),
            *method_notes(usual, named),
            *loop_notes({**usual, **named}, strategy, job),
            *([] if layout is None else [layout]),
        ),
        reasons=tuple(reasons),
        run=run,
    )


def stored_notes(usual: Mapping[str, Any]) -> Iterator[Problem]:
    """What is said where a checkpoint tells its quantization: nothing else assumes one."""
    if "quant" in usual:
        yield Problem(
            message=f"`--quant {usual['quant']}` is assumed: bitsandbytes stored the weights",
            where="job.quant",
            level="note",
        )


def method_notes(usual: Mapping[str, Any], named: Mapping[str, Any]) -> Iterator[Problem]:
    """What is said where another option meant the method."""
    known = {"quant": usual.get("quant", "none"), **named}
    implied = implied_method(known) if "method" in usual else None
    if implied is not None:
        option = implied.option.replace("_", "-")
        yield Problem(
            message=f"`--method {implied.name}` is assumed, because `--{option}` {implied.why}",
            where="job.method",
            hint="`--method` names another",
            level="note",
        )


def loop_notes(known: Mapping[str, Any], strategy: Strategy, job: Job) -> Iterator[Problem]:
    """What is said where no trainer is named and the layout rules out TRL's."""
    trl = TRAINERS["trl"]
    missing = [name for name, _ in strategy.uses() if name not in trl.layouts]
    if job.task == "finetune" and missing and "framework" not in known:
        flags = [
            f"--{name} {getattr(job, name)}"
            for name in ("batch", "seq", "checkpointing", "precision", "optimizer")
            if name not in known
        ]
        listed = ", ".join(f"`{name}`" for name in missing)
        yield Problem(
            message=f"{trl.name}'s trainer has no {listed}: assumes a training loop by hand",
            where="job.framework",
            hint=f"its defaults are `{' '.join(['--framework transformers', *flags])}`",
            level="note",
        )


def named_place(ask: Ask) -> str:
    """The GPU as flags."""
    flags = (("gpu", ask.gpu), ("memory", ask.memory))
    return " ".join(f"--{name} {shlex.quote(text)}" for name, text in flags if text)


def applied(model: Model, job: Job, cluster: Cluster | None, strategy: Strategy = ONE) -> None:
    """Let every technique that the job asks for say what is wrong with it on this model; one that
    no family knows has nothing to look at."""
    from memfit.program import Program
    from memfit.techniques import apply

    if model.layers:
        apply(
            Program(
                model=model,
                job=job,
                entries=(),
                weights=model.dtype,
                gpu=None if cluster is None else cluster.gpu,
                strategy=strategy,
            )
        )


def strangers(values: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Problem]:
    """What to say of names that are no options."""
    for name in values:
        if name not in known:
            text = str(name)
            yield of_an_engine(text) or unknown("option", text, text[:60], tuple(known))


def without_formula(
    ask: Ask, reasons: list[Problem], built: Model | None, source: Source | None
) -> tuple[Ask, list[Problem], tuple[Problem, ...]]:
    """Whether a trace answers or a rough bound, the reasons for it, and what is wrong where neither
    can: a bound needs a count of parameters."""
    lacking = tuple(trace_fallback.missing(reasons, built.config if built else {}))
    if not lacking:
        return dataclasses.replace(ask, by="trace"), reasons, ()
    if rough_bound_counts(source) > 0:
        return dataclasses.replace(ask, by="bound"), [*lacking], ()
    return dataclasses.replace(ask, by="trace"), [*lacking], lacking


def rough_bound_counts(source: Source | None) -> int:
    """Parameters that a rough bound may rest on; 0 for none."""
    from memfit.rough_bound import counted

    return counted(source)


def conflicts(ask: Ask, job: Job, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems that arise from combinations of options."""
    from memfit.simulate.settings import Settings

    found: list[Problem] = []
    text = values.get("alloc_conf", "")
    if isinstance(text, str):
        gather(found, Settings, lambda: Settings.parse(text, where="job.alloc_conf"))
    yield from found
    if ask.by == "trace" and job.batch * job.beams * job.reach > TRACED_TOKENS:
        message = f"{job.batch * job.beams * job.reach} tokens are too many for a trace"
        yield Problem(
            message=message,
            where="by",
            hint=f"use at most {TRACED_TOKENS}, or `--by formula`, which has no limit",
        )
    if ask.dataset_tokens and ask.examples:
        yield Problem(
            message="`dataset_tokens` and `examples` both set the size of the dataset",
            where="examples",
            hint="remove one of them",
        )
    if (ask.dataset_tokens or ask.examples) and not job.training:
        yield Problem(
            message="`dataset_tokens` and `examples` apply to training only",
            where="job.task",
            hint="use `--task finetune` or `pretrain`",
        )
    if (ask.dataset_tokens or ask.examples) and ask.by == "trace":
        yield Problem(
            message="a trace does not predict time",
            where="by",
            hint="omit `dataset_tokens` and `examples`; only formulas predict time",
        )
    if not values.get("gpu") and not values.get("memory"):
        for name in (
            "largest_batch",
            "longest_seq",
            "cheapest_precision",
            "advise",
            "dataset_tokens",
            "examples",
        ):
            if getattr(ask, name):
                message = f"`{name}` needs a GPU"
                yield Problem(
                    message=message,
                    where=name,
                    hint="add `--gpu rtx-4090`, or `--memory 24GiB`",
                )


__all__ = ["Question", "applied", "named_place", "question", "rough_bound_counts"]
