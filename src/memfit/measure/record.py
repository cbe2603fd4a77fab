"""Records of measurements: one JSON file for each case. Bytes are integers, seconds are floats."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from memfit.errors import InputError, Problem, raise_errors
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.measure import checks
from memfit.strategy import ONE, Strategy
from memfit.uses import strategy_from

SCHEMA = 2
LARGEST_FILE = 2**24  # bytes: configs are of some thousand, phases of some hundred each
HINT = "give a file that `memfit measure` wrote"


@dataclass(frozen=True, kw_only=True)
class Case:
    """`config` is the model's own; `use` and `rank`: one rank of this layout is run, with
    collectives that do nothing; `engine` serves in place of transformers."""

    model: str
    config: Mapping[str, Any] = field(repr=False)
    job: Job
    steps: int = 3
    use: tuple[str, ...] = ()
    rank: int = 0
    history: bool = False
    engine: str = ""

    @property
    def strategy(self) -> Strategy:
        return (
            dataclasses.replace(strategy_from(self.use, None), rank=self.rank) if self.use else ONE
        )

    @property
    def changes(self) -> dict[str, Any]:
        """The job's options that are not at their default."""
        return {
            one.name: getattr(self.job, one.name)
            for one in dataclasses.fields(Job)
            if getattr(self.job, one.name) != one.default
        }

    @property
    def name(self) -> str:
        """The same for the same case, whenever it is asked."""
        more = {"use": "+".join(self.use), "rank": self.rank, "engine": self.engine}
        known = {**self.changes, **{key: value for key, value in more.items() if value}}
        return "/".join(
            [self.model, ",".join(f"{key}={value}" for key, value in known.items()) or "default"]
        )

    @property
    def file(self) -> str:
        """A name for its record."""
        short = re.sub(r"[^\w.=,-]+", "_", self.name)[:120].strip("_")
        return f"{short}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}.json"


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that was held while the run was in one phase; `seconds` it took."""

    phase: str
    step: int
    allocated: int
    reserved: int | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Record:
    """`by`: the counters of CUDA's allocator, or torch's profiler on a CPU. `result`: ok, oom,
    timeout or error, and then `error` says more. `device` are NVML's figures: before, with a
    context, the most, after."""

    case: str
    model: str
    config: Mapping[str, Any] = field(repr=False)
    job: Mapping[str, Any]
    use: tuple[str, ...] = ()
    rank: int = 0
    world: int = 1
    by: str
    gpu: str = ""
    total: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    result: str
    error: str = ""
    asked: int | None = None
    free: int | None = None
    parameters: int | None = None
    trainable: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    requested: int | None = None
    device: Mapping[str, int] = field(default_factory=dict)
    retries: int | None = None
    phases: tuple[Peak, ...] = ()
    step_seconds: tuple[float, ...] = ()
    tokens_per_second: float | None = None
    flops_per_second: float | None = (
        None  # of the model: what recomputation does again is not counted
    )
    seconds: float = 0.0  # of the whole process
    engine: str = ""  # what served it, where that was not transformers
    events: str = ""  # the file of the allocator's own events, beside this one
    schema: int = SCHEMA


RECORD_FIELDS = frozenset(one.name for one in dataclasses.fields(Record))


def write(record: Record, path: Path) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(dataclasses.asdict(record), indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def read(path: Path) -> Record:
    return record_of(parsed(path), str(path))


def parsed(path: Path) -> Any:
    """What stands in the file; numbers that are none are no JSON."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise InputError.one(
                f"this is not a record: it has more than {LARGEST_FILE} bytes",
                where=str(path)[:200],
                hint=HINT,
            )
        return json.loads(text.decode("utf-8"), parse_constant=nothing)
    except OSError as bad:
        raise InputError.one(
            f"the record cannot be read: {(bad.strerror or 'unknown failure').lower()}",
            where=str(path)[:200],
        ) from None
    except (ValueError, RecursionError) as bad:
        raise InputError.one(
            f"this is not JSON: {bad}"[:200], where=str(path)[:200], hint=HINT
        ) from None


def nothing(name: str) -> Any:
    raise ValueError(f"`{name}` is not a number")


def record_of(values: Any, where: str) -> Record:
    """A record of this schema; anything else is bad input, told with all that is wrong with it."""
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise InputError.one(
            f"this is not a record of schema {SCHEMA}", where=where[:200], hint=HINT
        )
    problems = [
        Problem(
            message=one.message, where=f"{where[:200]}: {one.where}".rstrip(": "), hint=one.hint
        )
        for one in checks.problems(values, Record, Peak)
    ]
    raise_errors(problems)
    phases = tuple(Peak(**one) for one in values.get("phases", ()))
    found = {
        **values,
        "phases": phases,
        "use": tuple(values.get("use", ())),
        "step_seconds": tuple(values.get("step_seconds", ())),
    }
    return Record(**found)


def records(folder: Path) -> dict[Path, Record]:
    """All in a folder and below it, or one file, by their paths; problems of all of them at
    once."""
    problems: list[Problem] = []
    found: dict[Path, Record] = {}
    for path in sorted(folder.rglob("*.json")) if folder.is_dir() else [folder]:
        try:
            found[path] = read(path)
        except InputError as bad:
            problems += bad.problems
    raise_errors(problems)
    return found
