"""The trace's answers to published cases. The real code has the versions of the environment that it
runs in, so a row is traced where they are the row's, or where the formulas, which know what changed
between versions, give the same answer to the byte for both.

`python -m memfit.truth.traced [FILE]` answers what it can in this environment, a line of JSON a
row; answers to the bundled rows are kept in `data/traced.json` (`tools/traced.py` makes them).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.truth.case import Case

STORED = Path(__file__).parent / "data" / "traced.json"
LIBRARIES = ("torch", "transformers", "peft", "accelerate")  # whose code the trace runs


@dataclass(frozen=True, kw_only=True)
class Traced:
    """One answer. `key` is of what was asked: an answer to another question does not count.
    `versions` are those that ran; `instead`: of these libraries another version than the row's,
    about which the formulas say that it makes no difference."""

    id: str
    key: str
    predicted: int
    refuses: bool | None
    seconds: float
    versions: str
    instead: str = ""


def key(case: Case) -> str:
    """Of the question, as far as it is not the default, so that a new option of jobs leaves answers
    valid."""
    said = {
        one.name: value
        for one in fields(Job)
        if (value := getattr(case.job, one.name)) != one.default
    }
    layouts = {name: changed(layout) for name, layout in case.strategy.uses()} | {
        "rank": case.rank,
        "alike": case.alike,
    }
    gpu = None if case.gpu is None else case.gpu.name
    whole = [case.model, case.stored, case.config, said, layouts, gpu, case.metric]
    if case.added_tokens:
        whole.append(str(case.added_tokens))
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:12]


def changed(layout: Any) -> dict[str, Any]:
    return {
        one.name: value
        for one in fields(layout)
        if (value := getattr(layout, one.name)) != one.default
    }


@lru_cache(maxsize=1)
def installed() -> Mapping[str, str]:
    """Versions of the libraries that are here."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


def here(job: Job, versions: Mapping[str, str]) -> tuple[Job, tuple[str, ...]]:
    """The job as these versions run it, and the libraries that are not of the version that it says,
    or that is taken where it says none."""
    said = dict(one.split("=") for one in job.versions.replace(" ", "").split(",") if one)
    used = [name for name in LIBRARIES if name in versions and (name != "peft" or job.adapters)]
    odd = tuple(name for name in used if job.version(name) != short(versions[name]))
    now = said | {name: versions[name] for name in used}
    return job.replace(versions=",".join(f"{name}={one}" for name, one in now.items())), odd


def short(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def asked_here(
    case: Case, formulas: Callable[[Case], int], versions: Mapping[str, str] | None = None
) -> Job:
    """The job in the versions that are here. Raises where it is another one by the formulas, which
    say what a case comes to."""
    job, odd = here(case.job, installed() if versions is None else versions)
    if odd and formulas(case) != formulas(replace(case, job=job)):
        named = ", ".join(f"{name} {'.'.join(map(str, case.job.version(name)))}" for name in odd)
        message = (
            f"the trace needs an environment with {named}: by the formulas the installed "
            "versions hold something else"
        )
        raise InputError.one(message, where="job.versions", hint="run memfit in that environment")
    return job


@lru_cache(maxsize=1)
def stored() -> Mapping[str, Traced]:
    """The kept answers by the rows' ids."""
    return (
        {one["id"]: Traced(**one) for one in json.loads(STORED.read_bytes())["answers"]}
        if STORED.is_file()
        else {}
    )


@lru_cache(maxsize=1)
def refusals() -> Mapping[str, str]:
    """Why the other rows have no kept answer, by their ids."""
    told = json.loads(STORED.read_bytes())["refused"] if STORED.is_file() else {}
    return {name: why for why, names in told.items() for name in names}


def kept(case: Case) -> Traced | None:
    """The kept answer to this case, if this is what was asked."""
    found = stored().get(case.id)
    return found if found is not None and found.key == key(case) else None


def answers(
    path: Path | None = None, ids: frozenset[str] = frozenset()
) -> Iterator[Traced | tuple[str, str]]:
    """What the trace says of each case, here and now: an answer, or the case's id and why there is
    none."""
    from memfit.trace import trace
    from memfit.truth.accuracy import gathered
    from memfit.truth.answers import Outcome, asker, outcome
    from memfit.truth.published import read

    rows = [row for row in read(path) if isinstance(row, Case) and (not ids or row.id in ids)]
    versions = ", ".join(f"{name} {one}" for name, one in installed().items())
    for questions in gathered(rows):
        ask = asker(trace)
        for _, case in questions:
            found = outcome(case, ask, ())
            if isinstance(found, Outcome):
                yield Traced(
                    id=case.id,
                    key=key(case),
                    predicted=found.predicted,
                    refuses=found.refusals.get("memfit"),
                    seconds=round(found.seconds["memfit"], 2),
                    versions=versions,
                    instead=", ".join(here(case.job, installed())[1]),
                )
            else:
                yield case.id, f"{found.reason}: {found.detail}"


def main() -> int:
    """The rows named on stdin, one a line, or all."""
    wanted = frozenset(sys.stdin.read().split()) if not sys.stdin.isatty() else frozenset()
    for one in answers(Path(sys.argv[1]) if sys.argv[1:] else None, wanted):
        # The answer to who started this
        print(json.dumps(vars(one) if isinstance(one, Traced) else list(one)), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
