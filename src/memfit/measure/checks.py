"""Validation of records from others: the type and range of every field, and a consistent job and
layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memfit.errors import InputError, Problem
from memfit.job import job_from
from memfit.tape import PHASES
from memfit.uses import strategy_from

RESULTS = ("ok", "oom", "timeout", "error")
COUNTERS = ("cuda", "profiler")
LARGEST = 2**60  # bytes, tokens, operations
LONGEST = 100_000  # entries of a list


def text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 10_000


def count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def amount(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= LARGEST


def table(value: Any, of: Callable[[Any], bool] = lambda _: True) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) <= LONGEST
        and all(text(key) and of(one) for key, one in value.items())
    )


def listed(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) <= LONGEST and all(map(of, value))


def maybe(known: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or known(value)


def plain_name(value: Any) -> bool:
    """A file beside the record, nowhere else."""
    return (
        text(value)
        and "/" not in value
        and "\\" not in value
        and value not in (".", "..")
        and "\0" not in value
    )


def whole(value: Any) -> bool:
    return type(value) is int and -1 <= value <= LARGEST  # -1: the longest batch


# For each field what it must be: a test of its value, and how to say so.
TEXT, COUNT, AMOUNT = (
    (text, "text"),
    (count, "an integer of at least 0"),
    (amount, "a number of at least 0"),
)
COUNT_OR_NONE, AMOUNT_OR_NONE = (
    (maybe(count), COUNT[1] + ", or null"),
    (maybe(amount), AMOUNT[1] + ", or null"),
)
Rule = tuple[Callable[[Any], bool], str]
RULES: dict[str, Rule] = {
    **dict.fromkeys(("case", "model", "gpu", "error"), TEXT),
    **dict.fromkeys(("rank", "world", "schema"), COUNT),
    "seconds": AMOUNT,
    **dict.fromkeys(
        (
            "total",
            "asked",
            "free",
            "parameters",
            "trainable",
            "allocated",
            "reserved",
            "requested",
            "retries",
        ),
        COUNT_OR_NONE,
    ),
    **dict.fromkeys(("tokens_per_second", "flops_per_second"), AMOUNT_OR_NONE),
    "config": (table, "a table"),
    "job": (table, "a table of options"),
    "versions": (lambda value: table(value, text), "a table of texts"),
    "device": (lambda value: table(value, count), "a table of bytes"),
    "use": (lambda value: listed(value, text), "a list of texts"),
    "step_seconds": (lambda value: listed(value, amount), "a list of seconds"),
    "phases": (lambda value: listed(value, lambda one: isinstance(one, dict)), "a list of tables"),
    "by": (lambda value: value in COUNTERS, "one of " + ", ".join(COUNTERS)),
    "result": (lambda value: value in RESULTS, "one of " + ", ".join(RESULTS)),
    "events": (plain_name, "the name of a file beside the record"),
    "engine": TEXT,
}
PEAK: dict[str, Rule] = {
    "phase": (lambda value: value in PHASES, "one of " + ", ".join(PHASES)),
    "step": (whole, "a step"),
    "allocated": COUNT,
    "reserved": COUNT_OR_NONE,
    "seconds": AMOUNT,
}


def problems(values: Mapping[str, Any], record: type[Any], peak: type[Any]) -> Iterator[Problem]:
    yield from of_table(values, record, RULES, "")
    for number, one in enumerate(
        values.get("phases") or () if RULES["phases"][0](values.get("phases")) else ()
    ):
        yield from of_table(one, peak, PEAK, f"phases[{number}].")
    if table(values.get("job")):
        yield from refused(lambda: job_from(values["job"]))
    if RULES["use"][0](values.get("use", [])) and values.get("use"):
        yield from refused(lambda: strategy_from(values["use"], None))
        if not list(refused(lambda: strategy_from(values["use"], None))) and count(
            values.get("rank", 0)
        ):
            ranks = strategy_from(values["use"], None).ranks
            if values.get("rank", 0) >= ranks or values.get("world", ranks) != ranks:
                yield Problem(
                    message=(
                        f"rank {values.get('rank', 0)} of {values.get('world')} is not a rank of "
                        f"{ranks}"
                    ),
                    where="rank",
                )


def of_table(
    values: Mapping[str, Any], kind: type[Any], rules: Mapping[str, Rule], place: str
) -> Iterator[Problem]:
    fields = {one.name: one for one in dataclasses.fields(kind)}
    for name in values:
        if name not in fields:
            yield Problem(message=f"unknown field `{str(name)[:60]}`", where=place.rstrip("."))
    for name, one in fields.items():
        needed = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if name not in values:
            if needed:
                yield Problem(message=f"`{name}` is missing", where=place.rstrip("."))
        elif not rules[name][0](values[name]):
            yield Problem(
                message=f"`{str(values[name])[:60]}` is not {rules[name][1]}", where=place + name
            )


def refused(ask: Callable[[], Any]) -> Iterator[Problem]:
    try:
        ask()
    except InputError as bad:
        yield from bad.problems


__all__ = ["problems"]
