"""What memfit says of a measured case: formulas or the trace for a GPU, the trace acting as a CPU
for a CPU; numbers, and event by event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from memfit.errors import InputError
from memfit.hardware import Cluster, context, find_gpu
from memfit.job import job_from
from memfit.lazy_dataclass import dataclass
from memfit.lower import lower
from memfit.measure import events, history
from memfit.measure.record import Record, records
from memfit.model.families import build
from memfit.simulate.memory import memory
from memfit.simulate.replay import replay
from memfit.strategy import ONE, Strategy
from memfit.tape import Alloc, Free, Tape
from memfit.uses import strategy_from

NOT_SAID = "memfit has no answer for it"


class Predicted(NamedTuple):
    by: str
    allocated: int
    reserved: int | None
    device: int | None = None  # with the context of the process


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A record, what was predicted of it, and where the events were kept how alike they are. `why`:
    nothing was predicted, or compared."""

    record: Record
    predicted: Predicted | None
    compared: events.Compared | None = None
    why: str = ""

    def error(self, name: str) -> float | None:
        """Share of what was measured; below nought where too little was predicted."""
        measured, said = getattr(self.record, name), getattr(self.predicted, name, None)
        return said / measured - 1 if measured and said and self.record.result == "ok" else None

    @property
    def decided(self) -> bool | None:
        """Whether the verdict was right: an OOM is right where more than the GPU was predicted."""
        if (
            self.predicted is None
            or self.predicted.device is None
            or not self.record.total
            or self.record.result not in ("ok", "oom")
        ):
            return None
        return (self.predicted.device > self.record.total) == (self.record.result == "oom")


def predicted(record: Record, by: str = "formula") -> Predicted | None:
    """None where memfit has nothing to say: a run that failed, a model or GPU that it does not
    know."""
    return beside(record, None, by).predicted


def beside(record: Record, folder: Path | None, by: str) -> Beside:
    """`folder`: where its events lie, if they are to be compared: by the trace, whose order is that
    of the real code."""
    if record.result not in ("ok", "oom"):
        return Beside(record=record, predicted=None, why=f"it ended with {record.result}")
    if record.engine:
        return Beside(record=record, predicted=None, why=f"`{record.engine}` has no estimate yet")
    try:
        found = said(record, by)
        if folder is None or not record.events or record.result != "ok":
            return Beside(record=record, predicted=found)
        kept = history.read(folder / record.events)
        return Beside(
            record=record, predicted=found, compared=events.compare(kept, tape_of(record, "trace"))
        )
    except (InputError, NotImplementedError) as bad:
        return Beside(
            record=record, predicted=None, why=str(bad).splitlines()[0] if str(bad) else NOT_SAID
        )


def of_folder(
    path: Path, by: str, progress: Callable[[int, int, str], None], limit: int = 0
) -> list[Beside]:
    """Every record there beside what is said of it, or the first of them."""
    found = records(path)
    if not found:
        raise InputError.one(
            f"`{path}` has no records",
            where="records",
            hint="`memfit measure --out FOLDER` writes them",
        )
    return list(each(dict(list(found.items())[: limit or None]), path, by, progress))


def each(
    found: dict[Path, Record], path: Path, by: str, progress: Callable[[int, int, str], None]
) -> Iterator[Beside]:
    for number, (file, record) in enumerate(found.items()):
        progress(number, len(found), record.case)
        yield beside(record, file.parent, by)


def said(record: Record, by: str) -> Predicted:
    if record.by == "profiler":
        return Predicted("trace", live(tape_of(record, "trace")), None)
    tape, gpu = tape_of(record, by), find_gpu(record.gpu)
    found = memory(tape, replay(tape))
    outside = context(gpu)
    whole = None if found.reserved is None else found.reserved + (outside.low + outside.high) // 2
    return Predicted(
        "trace" if by == "trace" else "formulas", found.allocated, found.reserved, whole
    )


def tape_of(record: Record, by: str) -> Tape:
    job, strategy = job_from(record.job), strategy_of(record)
    if record.by == "cuda" and by != "trace":
        cluster = Cluster(gpu=find_gpu(record.gpu), nodes=strategy.ranks)
        return lower(build(record.config, name=record.model), job, strategy, cluster)
    from memfit.trace import trace_config

    steps = max((one.step for one in record.phases), default=1) + 1
    where = (
        {"gpu": find_gpu(record.gpu)} if record.by == "cuda" else {"device": "cpu", "sends": False}
    )
    return trace_config(
        record.config, job, decode_all=True, strategy=strategy, steps=steps, **where
    )


def strategy_of(record: Record) -> Strategy:
    return replace(strategy_from(record.use, None), rank=record.rank) if record.use else ONE


def live(tape: Tape) -> int:
    """The peak of the bytes that were asked for: a CPU's allocator rounds nothing."""
    sizes: dict[int, int] = {}
    held = peak = 0
    for event in tape:
        if type(event) is Alloc:
            sizes[event.id] = event.size
            held += event.size
            peak = max(peak, held)
        elif type(event) is Free:
            held -= sizes[event.id]
    return peak
