"""What others measured for the cells of a study: published rows with the same model, machine,
length, options and way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.plan.study import Cell, Panel, Study, Way
from memfit.strategy import Strategy
from memfit.truth.case import METRICS, Case
from memfit.truth.published import read

Found: TypeAlias = "dict[tuple[str, str, int, int], list[tuple[Way, Beside]]]"
COUNTERS = {
    "allocated": "allocated",
    "reserved": "reserved",
    "device": "device",
}  # of METRICS, what a cell has a figure for
FUSED = ("sdpa", "flash", "efficient", "cudnn", "flash-attn-2", "flash-attn-3")
SAME = (
    "batch",
    "precision",
    "accumulate",
    "loss",
    "liger",
    "unsloth",
    "targets",
    "rank",
    "quant",
)  # options that decide


@dataclass(frozen=True, kw_only=True)
class Beside:
    metric: str
    value: int
    source: str
    id: str

    @property
    def what(self) -> str:
        return METRICS[self.metric]

    def of(self, cell: Cell) -> int:
        return int(getattr(cell, COUNTERS[self.what]))


def published(study: Study) -> Found:
    return beside(study, cases(read()))


def beside(study: Study, measured: Iterable[Case]) -> Found:
    """Only cases whose other options are those of the study count as the same job."""
    found: dict[tuple[str, str, int, int], list[tuple[Way, Beside]]] = {}
    known = {
        (panel.model, panel.cluster.gpu.id, panel.cluster.gpus, panel.seq): panel
        for panel in study.panels
    }
    for case in measured:
        place = (
            case.model,
            "" if case.gpu is None else case.gpu.id,
            case.strategy.ranks,
            case.job.seq,
        )
        panel = known.get(place)
        way = None if panel is None else way_of(case.job, case.strategy, panel)
        if panel is None or way is None:
            continue
        mine = study.matrix.job(way, panel.cluster, panel.seq)
        if any(getattr(case.job, name) != getattr(mine, name) for name in SAME):
            continue
        one = Beside(
            metric=case.metric,
            value=case.value or 0,
            source=case.source.rpartition("/")[2],
            id=case.id,
        )
        if any(cell.way == way and not cell.refused for cell in panel.cells):
            found.setdefault(place, []).append((way, one))
    return found


def cases(rows: Iterable[object]) -> Iterator[Case]:
    for case in rows:
        if (
            isinstance(case, Case)
            and case.value
            and not case.stored
            and METRICS.get(case.metric) in COUNTERS
            and case.job.training
        ):
            yield case


def way_of(job: Job, strategy: Strategy, panel: Panel) -> Way | None:
    """None where the job is none of a study's ways."""
    layout = layout_of(strategy)
    attention = (
        next((cell.way.attention for cell in panel.cells if cell.way.attention != "eager"), "")
        if job.attention in FUSED
        else "eager"
    )
    if layout is None or job.checkpointing not in ("none", "full"):
        return None
    return Way(
        method=job.method, checkpointing=job.checkpointing, attention=attention, layout=layout
    )


def layout_of(strategy: Strategy) -> str | None:
    if not strategy:
        return "one GPU"
    engines = [name for name, layout in strategy.uses() if layout.size > 1]
    if engines == ["ddp"]:
        return "DDP"
    if engines == ["zero"] and strategy.zero is not None:
        return f"ZeRO-{strategy.zero.stage}" + (" + offload" if strategy.offloads else "")
    return None


__all__ = ["Beside", "Found", "beside", "published"]
