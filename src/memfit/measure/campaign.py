"""A campaign: many cases from one file, the most valuable first, within a budget of time, resumed
where an earlier call stopped."""

from __future__ import annotations

import itertools
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memfit.errors import InputError, Problem, raise_errors
from memfit.job import job_from
from memfit.lazy_dataclass import dataclass
from memfit.measure.record import Case, Record
from memfit.measure.run import COUNTED, device_here, measure, recorded
from memfit.registry import nearest

KEYS = ("models", "value", "job", "jobs", "steps", "use", "rank", "history", "layers", "engine")
SHORTEST = 20.0  # seconds: with less of the budget left no further case is begun
Configs = Callable[[str], Mapping[str, Any]]
One = Callable[..., Record]


@dataclass(frozen=True, kw_only=True)
class Planned:
    value: float
    case: Case


def read(path: Path, configs: Configs) -> list[Case]:
    """The cases of a campaign's file, the most valuable first; equal ones once. `configs` gives the
    config of a model's name."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError.one(
            f"`{path}` cannot be read: {(error.strerror or 'unknown failure').lower()}",
            where="campaign",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as bad:
        raise InputError.one(f"`{path}` is not valid TOML: {bad}"[:300], where="campaign") from None
    problems: list[Problem] = []
    planned: list[Planned] = []
    for number, table in enumerate(tables.get("cases", ())):
        try:
            planned += cases(table, configs, f"cases[{number}]")
        except InputError as bad:
            problems += bad.problems
    if not planned and not problems:
        problems.append(
            Problem(
                message=f"`{path}` has no cases",
                where="campaign",
                hint="add tables named [[cases]]",
            )
        )
    if problems:
        raise InputError(*problems)
    ordered = sorted(planned, key=lambda one: -one.value)
    return list({one.case.name: one.case for one in ordered}.values())


def cases(table: Mapping[str, Any], configs: Configs, where: str) -> Iterator[Planned]:
    """Lists among the options multiply; `jobs` are whole alternatives."""
    for key in table:
        if key not in KEYS:
            close = nearest(key, KEYS)
            hint = f"did you mean `{close[0]}`?" if close else "one of " + ", ".join(KEYS)
            raise InputError.one(f"unknown key `{key[:60]}`", where=where, hint=hint)
    models = table.get("models")
    if not isinstance(models, list) or not models:
        raise InputError.one("every [[cases]] table needs a list `models`", where=where)
    for model, alternative in itertools.product(models, table.get("jobs", [{}])):
        options = {**table.get("job", {}), **alternative}
        lists = {
            key: value if isinstance(value, list) else [value] for key, value in options.items()
        }
        layouts = table.get("use", "")
        for values in itertools.product(*lists.values()):
            for layout in layouts if isinstance(layouts, list) else [layouts]:
                case = Case(
                    model=model if "layers" not in table else f"{model}:{table['layers']}",
                    config=shortened(configs(model), table.get("layers")),
                    job=job_from(dict(zip(lists, values, strict=True))),
                    steps=int(table.get("steps", 3)),
                    use=tuple(str(layout).split()),
                    rank=int(table.get("rank", 0)),
                    history=bool(table.get("history", False)),
                    engine=str(table.get("engine", "")),
                )
                raise_errors([] if case.strategy.rank < case.strategy.ranks else [no_rank(case)])
                yield Planned(value=float(table.get("value", 0)), case=case)


def no_rank(case: Case) -> Problem:
    return Problem(
        message=(f"rank {case.rank} does not exist: the layout has {case.strategy.ranks} ranks"),
        where="rank",
        hint="ranks start at 0",
    )


def shortened(config: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """A model of fewer layers, where the whole one is larger than any GPU."""
    if layers is None:
        return dict(config)
    names = [
        key for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if key in config
    ]
    short: dict[str, Any] = {**config, **dict.fromkeys(names, layers)}
    if isinstance(short.get("layer_types"), list):
        short["layer_types"] = short["layer_types"][:layers]
    return short


def run(
    todo: list[Case],
    folder: Path,
    *,
    budget: float,
    limit: float,
    told: Callable[[Case, Record | None], None],
    one: One = measure,
) -> list[Record]:
    """Cases in order until the budget is spent; those with a record in the folder are done. `told`
    hears of each, before and after. What cannot be run here for lack of a package, and what the
    budget's end cut off, is told and left for another call."""
    start = time.monotonic()
    device = device_here()
    made: list[Record] = []
    for case in todo:
        if (folder / case.file).exists():
            continue
        left = budget - (time.monotonic() - start)
        if left < SHORTEST:
            break
        told(case, None)
        try:
            record = one(case, folder, device=device, limit=min(left, limit))
        except InputError as bad:
            reason = "; ".join(problem.message for problem in bad.problems)
            record = recorded(
                case,
                {"result": "error", "error": f"refused: {reason}"[:500], "by": COUNTED[device]},
                0.0,
            )
        if record.result == "timeout" and left < limit:
            (folder / case.file).unlink(missing_ok=True)
        made.append(record)
        told(case, record)
    return made
