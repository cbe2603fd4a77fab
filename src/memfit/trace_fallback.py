"""Notes on a trace that runs because no formula supports the model: why it runs, or what it is
missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError, Problem
from memfit.model.equivalents import converted

if TYPE_CHECKING:
    from memfit.estimate import Estimate
    from memfit.job import Job

PACKAGES = ("torch", "transformers")
TABLES = ("configuration_auto.py", "auto_mappings.py")  # the latter since transformers 5
LIKE = "`--like NAME` uses the formulas of another family"


def missing(reasons: Sequence[Problem], config: Mapping[str, Any]) -> Iterable[Problem]:
    """The reasons as errors, each with what to do, where no trace can run: the packages are not
    installed, or transformers has no code for the model type."""
    if not all(find_spec(name) for name in PACKAGES):
        hint = (
            f"`pip install 'memfit[trace]'`: the same command then traces the real code; or {LIKE}"
        )
    elif not in_transformers(str(converted(config).get("model_type"))):
        hint = f"transformers does not support it, either; {LIKE}"
    else:
        return ()
    return tuple(dataclasses.replace(one, hint=hint) for one in reasons)


def in_transformers(kind: str) -> bool:
    """Whether the installed transformers lists the model type; its tables are read as text, which
    takes milliseconds where an import takes seconds."""
    found = find_spec("transformers")
    folder = Path(found.origin).parent if found is not None and found.origin else None
    places = [] if folder is None else [folder / "models" / "auto" / name for name in TABLES]
    tables = [one for one in places if one.is_file()]
    quoted = (f'"{kind}"', f"'{kind}'")
    texts = [one.read_text(encoding="utf-8", errors="replace") for one in tables]
    return not texts or any(word in text for text in texts for word in quoted)


def within_positions(job: Job, config: Mapping[str, Any]) -> Job:
    """With the longest sequence of a power of two that the model has positions for, where its
    config counts them and the default is longer."""
    known = config.get("max_position_embeddings")
    more = 0 if job.training else job.new_tokens
    if (
        not isinstance(known, int)
        or isinstance(known, bool)
        or not more + 1 < known < job.seq + more
    ):
        return job
    return job.replace(seq=1 << ((known - more).bit_length() - 1))


def no_checkpoints(bad: InputError) -> bool:
    """Whether the class that is traced refuses gradient checkpointing."""
    return any(one.where == "job.checkpointing" for one in bad.problems)


@contextmanager
def joined(reasons: Sequence[Problem]) -> Iterator[None]:
    """Where the trace fails, too, its problems stand behind those that led to it."""
    try:
        yield
    except InputError as bad:
        first = (dataclasses.replace(one, hint="") for one in reasons)
        errors = (one for one in bad.problems if one.level == "error")
        raise InputError(*first, *errors) from bad


def explained(estimate: Estimate, reasons: Sequence[Problem], cached: bool) -> Estimate:
    """With a note that says why a trace answers; none where one was asked for by name."""
    if not reasons:
        return estimate
    why = " and ".join(dict.fromkeys(one.message.partition(";")[0] for one in reasons))
    how = (
        "the answer is from a cached trace"
        if cached
        else "the answer is from a trace of the real code"
    )
    note = Problem(
        message=f"{why}, so {how}",
        where=reasons[0].where,
        hint="a trace predicts no time",
        level="note",
    )
    return dataclasses.replace(estimate, problems=(note, *estimate.problems))


__all__ = ["explained", "joined", "missing", "no_checkpoints", "within_positions"]
