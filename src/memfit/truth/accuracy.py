"""How far memfit and every known method are off on measured cases: one outcome a case, statistics a
group, nothing averaged over lines of different sources."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

from memfit.errors import InputError
from memfit.lazy_dataclass import dataclass
from memfit.processes import answers
from memfit.registry import nearest
from memfit.tape import Producer
from memfit.truth.answers import (
    OURS,
    OWN,
    PEAKS,
    TRACE,
    KernelOutcome,
    Outcome,
    asker,
    of_kernel,
    outcome,
    question,
    technique,
)
from memfit.truth.baselines import BASELINES, Baseline
from memfit.truth.baselines.peers import PEERS, asked
from memfit.truth.case import KERNEL, KINDS, ONE, SERVED, SEVERAL, Case, Refused
from memfit.truth.published import read
from memfit.truth.served import ServedOutcome, judge, read_served
from memfit.truth.served_speed import SpeedOutcome, judge_speed, read_speeds
from memfit.truth.single import Kernel
from memfit.truth.statistics import Figures, averaged, figures, middle

CERTAIN = "high"  # the confidence of rows that describe a run completely
TRAINING, INFERENCE = "training", "inference"
ANSWERED_APART = 32  # questions; fewer are not worth another process


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """`kernels` are apart: a single kernel is no run, and enters no average over runs."""

    outcomes: tuple[Outcome, ...]
    refused: tuple[Refused, ...]
    kernels: tuple[KernelOutcome, ...] = ()
    absent: tuple[str, ...] = ()  # tools that were wanted and are not installed
    served: tuple[ServedOutcome, ...] = ()  # start-up logs of serving engines
    speeds: tuple[SpeedOutcome, ...] = ()  # of one request to a serving engine

    @property
    def rows(self) -> int:
        return len(self.outcomes) + len(self.refused) + len(self.kernels)

    def groups(
        self, confidence: str = "", *, fixed: bool = False
    ) -> dict[tuple[str, str], list[Outcome]]:
        """Outcomes with a figure, by source and metric; with a confidence, those of it alone;
        `fixed`: without runs whose lengths vary."""
        found: dict[tuple[str, str], list[Outcome]] = {}
        for one in self.outcomes:
            if fixed and one.case.lengths_vary:
                continue
            if one.case.metric != "oom" and confidence in ("", one.case.confidence):
                found.setdefault((one.case.source, one.case.metric), []).append(one)
        return dict(sorted(found.items()))

    def by(self, name: Callable[[Outcome], str]) -> dict[str, list[Outcome]]:
        """Outcomes with a figure for a peak, by whatever `name` says of them."""
        found: dict[str, list[Outcome]] = {}
        for one in self.outcomes:
            if one.case.metric in PEAKS:
                found.setdefault(name(one), []).append(one)
        return dict(sorted(found.items()))

    def reasons(self) -> dict[tuple[str, str], tuple[int, int]]:
        """How many rows were refused, those described completely and all, by kind of row and
        reason; first what one GPU could answer. Where memfit is the reason, in its words."""
        counts: Counter[tuple[str, str]] = Counter()
        certain: Counter[tuple[str, str]] = Counter()
        for one in self.refused:
            key = one.kind, f"{one.reason}: {one.detail}" if one.reason in OWN else one.reason
            counts[key] += 1
            certain[key] += one.confidence == CERTAIN
        ordered = sorted(
            counts.items(), key=lambda item: (KINDS.index(item[0][0]), -item[1], item[0][1])
        )
        return {key: (certain[key], count) for key, count in ordered}

    def tasks(self) -> dict[str, tuple[int, int]]:
        """Of the rows that carry memory and are described completely: how many are answered of how
        many. Serving engines are apart."""
        found = {TRAINING: (0, 0), INFERENCE: (0, 0), SERVED: (0, 0)}
        answered = (
            (
                TRAINING if one.case.job.training else INFERENCE,
                one.case.kind,
                one.case.confidence,
                1,
            )
            for one in self.outcomes
        )
        refused = (
            (INFERENCE if one.task.startswith("inf") else TRAINING, one.kind, one.confidence, 0)
            for one in self.refused
        )
        for task, kind, confidence, said in (*answered, *refused):
            if kind in (ONE, SEVERAL, SERVED) and confidence == CERTAIN:
                group = SERVED if kind == SERVED else task
                found[group] = found[group][0] + said, found[group][1] + 1
        return {name: counts for name, counts in found.items() if counts[1]}

    def shares(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Rows answered and rows in all, by kind of row and by confidence."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        everyone = [
            *((one.case.kind, one.case.confidence, 1) for one in self.outcomes),
            *((KERNEL, one.kernel.confidence, 1) for one in self.kernels),
        ]
        for kind, confidence, answered in (
            *everyone,
            *((one.kind, one.confidence, 0) for one in self.refused),
        ):
            for group in ("all", confidence):
                before = found.setdefault(kind, {}).get(group, (0, 0))
                found[kind][group] = before[0] + answered, before[1] + 1
        return {kind: found[kind] for kind in KINDS if kind in found}

    def failures(self) -> dict[str, tuple[int, str]]:
        """For each tool whose code broke, on how many cases and first on what."""
        found: dict[str, tuple[int, str]] = {}
        for one in self.outcomes:
            for method, words in one.failed.items():
                count, first = found.get(method, (0, words))
                found[method] = count + 1, first
        return found

    def seconds(self, method: str = OURS) -> float | None:
        """The middle of what an answer took."""
        spent = sorted(one.seconds[method] for one in self.outcomes if method in one.seconds)
        return middle(spent) if spent else None

    def worst(self, count: int) -> list[Outcome]:
        return sorted(
            (one for one in self.outcomes if one.case.value), key=lambda one: -abs(one.error() or 0)
        )[:count]

    def decisions(self, method: str = OURS) -> tuple[int, int]:
        """Of the runs that went out of memory, those where the method says so, and all it was asked
        about."""
        asked = [
            one.refusals[method]
            for one in self.outcomes
            if one.case.metric == "oom" and method in one.refusals
        ]
        return sum(asked), len(asked)

    def fitted(self, method: str = OURS) -> tuple[int, int]:
        """Of the runs that went through on a named GPU, those where the method says no, and all it
        was asked about."""
        asked = [
            one.refusals[method]
            for one in self.outcomes
            if one.case.metric in PEAKS and method in one.refusals
        ]
        return sum(asked), len(asked)


Progress = Callable[[int, int, str], None]  # rows done, rows in all, what is next
Question: TypeAlias = (
    "list[tuple[int, Case]]"  # places and rows, which differ only in what of one run they tell
)
Answer: TypeAlias = "Outcome | KernelOutcome | Refused"


def accuracy(
    path: str | Path | None = None,
    *,
    confidence: str = "",
    source: str = "",
    limit: int = 0,
    producer: Producer | None = None,
    progress: Progress | None = None,
    peers: bool = False,
    processes: int = 1,
) -> Accuracy:
    """Every row of a file in the form of the bundled collection (None: that itself), answered or
    refused with a reason.

    `confidence` and `source` narrow what is looked at: equal to the row's, and contained in it;
    `limit` ends after so many cases. `peers`: the real tools that are installed are asked too.
    `processes` share the work of many formulas."""
    logs = [
        row
        for row in read_served(path)
        if confidence in ("", row.confidence) and source.lower() in row.source.lower()
    ]
    chosen = selected(path, confidence, source, limit, others=bool(logs))
    questions = list(gathered(chosen))
    found: dict[int, Answer] = {}
    tell = progress or (lambda done, rows, what: None)
    shared = processes > 1 and producer is None and not peers and len(questions) > ANSWERED_APART
    for number, row in enumerate(chosen):
        if isinstance(row, Kernel):
            tell(number, len(chosen), row.id)
            found[number] = of_kernel(row)
    ask = partial(answered, producer=producer, peers=peers)
    for _, some in answers(ask, questions, processes if shared else 1):
        found.update(some)
        tell(len(found) - 1, len(chosen), chosen[next(iter(some))].id)
    ordered = [
        row if isinstance(row, Refused) else found[number] for number, row in enumerate(chosen)
    ]
    absent = tuple(
        f"{one.name} (pip install {one.install})" for one in PEERS if peers and not one.installed
    )
    return Accuracy(
        outcomes=tuple(one for one in ordered if isinstance(one, Outcome)),
        refused=tuple(one for one in ordered if isinstance(one, Refused)),
        kernels=tuple(one for one in ordered if isinstance(one, KernelOutcome)),
        absent=absent,
        served=tuple(map(judge, logs)),
        speeds=() if confidence or source else tuple(map(judge_speed, read_speeds(path))),
    )


def gathered(rows: Iterable[Case | Kernel | Refused]) -> Iterator[Question]:
    """Rows of one run together, in order of appearance."""
    found: dict[object, Question] = {}
    for number, row in enumerate(rows):
        if isinstance(row, Case):
            found.setdefault(question(row), []).append((number, row))
    yield from found.values()


def answered(
    of_one_run: Question, producer: Producer | None = None, peers: bool = False
) -> dict[int, Outcome | Refused]:
    """Without the cycle collector: it would go through each tape while it grows, and through all
    that is kept."""
    methods: tuple[Baseline, ...] = (*BASELINES, *(asked() if peers else ()))
    enabled = gc.isenabled()
    gc.disable()
    try:
        ask = asker(producer)
        return {number: outcome(one, ask, methods) for number, one in of_one_run}
    finally:
        if enabled:
            gc.enable()


def selected(
    path: str | Path | None, confidence: str, source: str, limit: int, others: bool = False
) -> list[Case | Kernel | Refused]:
    """The rows that are asked for; one problem for each wish that no row meets, unless `others`
    meet them."""
    everything = list(read(path))
    if others and not any(
        source.lower() in one.source.lower() and confidence in ("", one.confidence)
        for one in everything
        if isinstance(one, Refused | Case)
    ):
        return []
    if not everything:
        raise InputError.one(
            "the file has no rows",
            where="path",
            hint="one JSON object a line, with `id`, `source`, `model`, `metric`, `value` …",
        )
    if all(isinstance(one, Refused) and one.reason in UNREADABLE for one in everything):
        message = f"no line of the file is a row: {len(everything)} lines are no JSON objects"
        raise InputError.one(
            message,
            where="path",
            hint="one JSON object a line, with `id`, `source`, `model`, `metric`, `value` …",
        )
    meant = [one for one in everything if source.lower() in one.source.lower()]
    if not meant:
        known = sorted({one.source for one in everything})
        close = nearest(source, known) or tuple(known[:4])
        raise InputError.one(
            f"no row is from a source with `{source[:60]}` in its name",
            where="source",
            hint=f"there are {listed(close)}",
        )
    found: list[Case | Kernel | Refused] = [
        one for one in meant if not confidence or one.confidence == confidence
    ]
    if not found:
        raise InputError.one(
            f"none of these rows has confidence `{confidence}`", where="confidence"
        )
    if limit:
        answerable: list[Case | Kernel | Refused] = [
            one for one in found if not isinstance(one, Refused)
        ]
        return (answerable or found)[:limit]
    return found


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in list(names)[:4])


UNREADABLE = ("no JSON", "no JSON object")


def over_sources(
    found: Mapping[tuple[str, str], Iterable[Outcome]], method: str = OURS
) -> Figures | None:
    """The mean over sources of the mean over a source's metrics."""
    sources: dict[str, list[Figures]] = {}
    for (source, _), group in found.items():
        one = figures(error for case in group if (error := case.error(method)) is not None)
        if one is not None:
            sources.setdefault(source, []).append(one)
    return averaged(sources.values())


METHODS: tuple[str, ...] = (OURS, TRACE, *(one.name for one in (*BASELINES, *PEERS)))
__all__ = [
    "BASELINES",
    "CERTAIN",
    "METHODS",
    "OURS",
    "PEAKS",
    "TRACE",
    "Accuracy",
    "Baseline",
    "Figures",
    "KernelOutcome",
    "Outcome",
    "accuracy",
    "figures",
    "over_sources",
    "technique",
]
