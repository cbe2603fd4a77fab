"""How far predicted speeds are off: training and generation whose tokens a second, on each GPU,
somebody measured and published."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.hardware import Cluster
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.lower import lower
from memfit.model.model import Model
from memfit.simulate.time import GRADIENTS
from memfit.strategy import Strategy
from memfit.tape import Alloc, Compute, Event, Tape
from memfit.truth.answers import NODE
from memfit.truth.case import STANDS, Case, Refused, Unfit
from memfit.truth.llama_speed import LlamaOutcome, judge_llama, read_llama_rows
from memfit.truth.models import built
from memfit.truth.published import refused, server, understand
from memfit.truth.rows import LARGEST, Row, count, number, read_rows
from memfit.truth.statistics import Figures, averaged, figures

Told = dict[tuple[object, ...], float]
SAME = 4  # runs of one model on one GPU, in how many the order of their speeds is worth a number


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens a second on each GPU."""

    case: Case
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """`decoding` and `prompts`: what llama.cpp and Ollama generate and read, by sources that no
    constant is fitted to."""

    found: tuple[Speed, ...]
    refused: tuple[Refused, ...]
    decoding: tuple[LlamaOutcome, ...] = ()
    prompts: tuple[LlamaOutcome, ...] = ()

    def only(self, *, training: bool) -> Speeds:
        return dataclasses.replace(
            self, found=tuple(one for one in self.found if one.case.job.training == training)
        )

    def sources(self) -> dict[str, list[Speed]]:
        groups: dict[str, list[Speed]] = defaultdict(list)
        for one in self.found:
            groups[one.case.source].append(one)
        return dict(sorted(groups.items()))

    def figures(self, source: str = "") -> Figures | None:
        """Of one source; without a name, averaged over sources."""
        if source:
            return figures(one.error for one in self.sources()[source])
        return averaged(
            [one]
            for some in self.sources().values()
            if (one := figures(speed.error for speed in some))
        )

    def order(self, source: str) -> float | None:
        """Spearman's rank correlation within one model on one GPU, the mean over those with runs
        enough."""
        groups: dict[tuple[str, str], list[Speed]] = defaultdict(list)
        for one in self.sources()[source]:
            groups[
                one.case.model.partition(" (")[0], "" if one.case.gpu is None else one.case.gpu.id
            ].append(one)
        known = [
            correlation([(one.measured, one.predicted) for one in some])
            for some in groups.values()
            if len(some) >= SAME
        ]
        return sum(known) / len(known) if known else None


def speeds(path: str | Path | None = None, *, source: str = "", confidence: str = "") -> Speeds:
    """Every run that states its speed, once: rows of one run differ in what memory they tell."""
    found: list[Speed] = []
    without: list[Refused] = []
    known: set[tuple[object, ...]] = set()
    told: Told = {}
    for row in read_rows(path):
        if (
            isinstance(row, Refused)
            or not isinstance(row.speed, dict)
            or source not in row.source
            or confidence not in ("", row.confidence)
        ):
            continue
        answer = said(row, told)
        if isinstance(answer, Refused):
            without.append(answer)
            continue
        key = (
            answer.case.model,
            answer.case.config,
            answer.case.added_tokens,
            answer.case.job,
            answer.case.gpu,
            answer.case.strategy,
            answer.measured,
        )
        if key not in known:
            known.add(key)
            found.append(answer)
    llama = held_out_llama(source, confidence) if path is None else ()
    return Speeds(
        found=tuple(found),
        refused=tuple(without),
        decoding=tuple(one for one in llama if one.row.decoding),
        prompts=tuple(one for one in llama if not one.row.decoding),
    )


def held_out_llama(source: str, confidence: str) -> tuple[LlamaOutcome, ...]:
    return tuple(
        judge_llama(row)
        for row in read_llama_rows()
        if row.held_out and source in row.source and confidence in ("", row.confidence)
    )


def said(row: Row, told: Told | None = None) -> Speed | Refused:
    """The run alone, whatever memory was measured of it. `told`: what was predicted so far."""
    if served := server(row):
        return refused(row, "serving engines: not yet", served)
    case = understand(
        dataclasses.replace(row, metric="peak_allocated", value=LARGEST, unit="bytes")
    )
    if isinstance(case, Refused):
        return case
    if not isinstance(case, Case) or case.gpu is None:
        return refused(row, "no training run", "")
    if STANDS in case.notes:
        return refused(row, "another code's kernels stand for those that ran", "")
    try:
        measured, predicted = stated(row, case), once(case, {} if told is None else told)
    except Unfit as why:
        return refused(row, why.reason, why.detail)
    except InputError as bad:
        return refused(row, "memfit refuses the job", str(bad.problems[0].message))
    # As for memory: named, and the other rows are still answered
    except Exception as defect:  # noqa: BLE001
        return refused(row, "a defect of memfit", f"{type(defect).__name__}: {defect}"[:120])
    if measured <= 0 or predicted <= 0:
        return refused(
            row, "the speed is no positive number", f"{measured:g}, predicted {predicted:g}"
        )
    return Speed(case=case, measured=measured, predicted=predicted)


def stated(row: Row, case: Case) -> float:
    """Tokens a second on each GPU, as published. Samples a second are none, where samples are
    shorter than the longest."""
    gpus, job = count(row.gpus) or 1, case.job
    if not job.training:
        return generated(row, case)
    each, every, step = (
        number(row.speed.get(key)) for key in ("tokens_per_s_per_gpu", "tokens_per_s", "step_ms")
    )
    if step:
        shares = case.strategy.ranks // (
            case.strategy.size("tp") * case.strategy.size("cp") * case.strategy.size("pp")
        )
        every = job.batch * job.seq * job.accumulate * shares / (step / 1e3)
    if each or every:
        return each or (every or 0.0) / gpus
    raise Unfit("the speed is not in tokens of full sequences", ", ".join(row.speed))


def generated(row: Row, case: Case) -> float:
    """New tokens a second of all sequences, in a loop that nothing compiles."""
    job, compiled = case.job, str(row.more("compile")) == "True"
    if compiled:
        raise Unfit("compiled: no time yet", row.engine)
    if both := number(row.speed.get("tokens_per_s_prompt_plus_generated")):
        return both * job.new_tokens / (job.seq + job.new_tokens)
    if found := number(row.speed.get("tokens_per_s")) or number(row.speed.get("tok_s")):
        return found
    raise Unfit("the speed is not in new tokens", ", ".join(row.speed))


def once(case: Case, told: Told) -> float:
    """Rows of one run differ in what memory they tell."""
    model = case.model, case.stored, case.config, case.added_tokens
    key = (*model, case.job, case.gpu, case.strategy, case.attention)
    if key not in told:
        told[key] = predict(case)
    return told[key]


def predict(case: Case) -> float:
    assert case.gpu is not None
    ranks = case.strategy.ranks
    cluster = Cluster(gpu=case.gpu, gpus_per_node=min(NODE, ranks), nodes=-(-ranks // NODE))
    model = built(case.model, case.stored, case.config, case.added_tokens)

    def ran(model: Model, job: Job, strategy: Strategy, cluster: Cluster) -> Tape:
        tape = lower(model, job, strategy, cluster, compact=True, passes=0)
        if not case.attention:
            return tape
        return dataclasses.replace(tape, events=tuple(map(attending, tape.events)))

    def attending(event: Event) -> Event:
        if not isinstance(event, (Alloc, Compute)) or not event.op.removesuffix(GRADIENTS).endswith(
            "attention"
        ):
            return event
        return event._replace(
            op=case.attention + (GRADIENTS if event.op.endswith(GRADIENTS) else "")
        )

    # Estimates that are not precise write few decoding passes; a time needs all of a precise one.
    own = bool(case.attention) or not case.job.training
    found = estimate(
        model,
        case.job,
        cluster,
        case.strategy,
        producer=ran if own else None,
        precise=False,
    )
    time = found.time if case.job.training else found.generation
    if time is None:
        raise Unfit(
            "no time for this layout, kernel or GPU",
            ", ".join(name for name, _ in case.strategy.uses()),
        )
    return time.tokens_per_second / ranks


def correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's, ties sharing their ranks."""
    first, second = (ranked([pair[at] for pair in pairs]) for at in (0, 1))
    middle = (len(pairs) + 1) / 2
    above = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    spread = [sum((one - middle) ** 2 for one in ranks) for ranks in (first, second)]
    return above / (spread[0] * spread[1]) ** 0.5 if all(spread) else 1.0


def ranked(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(one) + (ordered.count(one) + 1) / 2 for one in values]


def reasons(found: Speeds) -> Iterator[tuple[str, int]]:
    """Why rows have no answer, the most frequent first."""
    counts: dict[str, int] = defaultdict(int)
    for one in found.refused:
        counts[one.reason] += 1
    yield from sorted(counts.items(), key=lambda item: (-item[1], item[0]))


__all__ = ["Speed", "Speeds", "correlation", "reasons", "speeds"]
