"""Predictions beside published measurements and records of our own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError, Problem
from memfit.lazy_dataclass import dataclass
from memfit.option_values import unknown
from memfit.words.models import producer_of
from memfit.words.options import PRODUCERS

if TYPE_CHECKING:
    from memfit.measure.compare import Beside
    from memfit.truth.accuracy import Accuracy
    from memfit.truth.speed import Speeds


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which rows of the published figures are looked at."""

    confidence: str = ""
    source: str = ""
    limit: int = 0


def accuracy(
    path: str | os.PathLike[str] = "",
    *,
    by: str = "formula",
    peers: bool = False,
    processes: int = 1,
    progress: Callable[[int, int, str], None] | None = None,
    problems: Sequence[Problem] = (),
    **only: Any,
) -> Accuracy:
    """Compare memfit and other methods with published measurements: the bundled ones, or those of a
    file in the same form; `only` are the fields of `Rows`. `peers`: also run other tools that are
    installed. `processes` share the work; they are started anew, so a program that asks for several
    has to be importable. `problems` are those found before."""
    from memfit.truth.accuracy import accuracy as compare

    rows = Rows(**only)
    problems = [*problems, *_unread(path, rows)]
    if by not in PRODUCERS:
        problems.append(unknown("producer", by, "by", PRODUCERS))
    if rows.limit < 0:
        problems.append(
            Problem(
                message=f"`{rows.limit}` is not a number of cases",
                where="limit",
                hint="0 means all",
            )
        )
    if processes < 1:
        problems.append(
            Problem(
                message=f"`{processes}` is not a number of processes",
                where="processes",
                hint="1 or more",
            )
        )
    if problems:
        raise InputError(*problems)
    return compare(
        Path(path) if path else None,
        producer=producer_of(by),
        progress=progress,
        peers=peers,
        processes=processes,
        **dataclasses.asdict(rows),
    )


def beside(
    path: str | os.PathLike[str],
    *,
    by: str = "formula",
    limit: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
    problems: Sequence[Problem] = (),
) -> list[Beside]:
    """Compare a record of `memfit measure`, or a folder of them, with the prediction: event by
    event where the record has events. `limit`: read at most this many records. `problems`: those
    found before."""
    from memfit.measure.compare import of_folder

    wrong = [*problems, *([] if by in PRODUCERS else [unknown("producer", by, "by", PRODUCERS)])]
    if wrong:
        raise InputError(*wrong)
    return of_folder(Path(path), by, progress or (lambda *_: None), limit)


def speeds(
    path: str | os.PathLike[str] = "",
    *,
    source: str = "",
    confidence: str = "",
    problems: Sequence[Problem] = (),
) -> Speeds:
    """How far predicted training speeds are off, on the same rows."""
    from memfit.truth.speed import speeds as compare

    if wrong := [*problems, *_unread(path, Rows(confidence=confidence, source=source))]:
        raise InputError(*wrong)
    return compare(Path(path) if path else None, source=source, confidence=confidence)


def _unread(path: str | os.PathLike[str], rows: Rows) -> Iterator[Problem]:
    from memfit.truth.case import CONFIDENCES

    if rows.confidence and rows.confidence not in CONFIDENCES:
        yield unknown("confidence", rows.confidence, "confidence", CONFIDENCES)
    if path and not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "is not a file"
        yield Problem(
            message=f"`{os.fspath(path)[:200]}` {what}", where="path", hint="give a .jsonl file"
        )


__all__ = ["Rows", "accuracy", "beside", "speeds"]
