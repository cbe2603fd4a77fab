"""Values of options: read from text, and what is wrong with one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from memfit.errors import Problem
from memfit.registry import nearest
from memfit.units import parse_count
from memfit.unrelated_options import NO_OBJECTIVE, OBJECTIVES, OTHER_TRAINERS, unrelated

NAMES = {"str": "text", "int": "an integer", "bool": "true or false", "float": "a number"}


_SCALED = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([kKmMbB])", re.ASCII)


_SCALES = {"k": 10**3, "m": 10**6, "b": 10**9}


@lru_cache(
    maxsize=4096, typed=True
)  # a search makes thousands of jobs of the same few values; True is no 1
def sound(one: dataclasses.Field[Any], value: Any) -> bool:
    """Whether nothing is wrong with one value."""
    return not any(True for _ in field_problems(one, value))


def field_problems(one: dataclasses.Field[Any], value: Any) -> Iterator[Problem]:
    """What is wrong with one value: its type, its choice or its range."""
    where, kind, rule = f"job.{one.name}", one.type, one.metadata
    kinds: dict[str, Any] = {"str": str, "int": int, "bool": bool, "float": (int, float)}
    wanted = kinds[str(kind)]
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "bool"):
        hint = (
            "put it in quotes"
            if kind == "str" and isinstance(value, (int, float)) and not isinstance(value, bool)
            else ""
        )
        yield Problem(
            message=f"`{str(value)[:60]}` must be {NAMES[str(kind)]}", where=where, hint=hint
        )
        return
    if rule["choices"] and value not in rule["choices"]:
        yield unknown(one.name, value, where, rule["choices"])
    low, high = rule["low"], rule["high"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        yield Problem(
            message=f"`{value}` is out of range", where=where, hint=f"must be from {low} to {high}"
        )


def unknown(kind: str, value: str, where: str, known: tuple[str, ...]) -> Problem:
    """What to say of a name that is none of `known`."""
    folded = value.lower().replace("_", "-")
    if kind == "option" and (known_elsewhere := unrelated(value, where)):
        return known_elsewhere
    if kind in ("task", "method", "loss", "framework") and folded in OBJECTIVES:
        message = f"`{value[:60]}` is not supported yet"
        return Problem(message=message, where=where, hint=NO_OBJECTIVE)
    if kind == "framework" and (instead := OTHER_TRAINERS.get(folded)):
        return Problem(message=f"unknown framework `{value[:60]}`", where=where, hint=instead)
    close = nearest(value, known, cutoff=0.6)
    hint = (
        "did you mean " + ", ".join(f"`{one}`" for one in close) + "?"
        if close
        else "one of " + ", ".join(known)
    )
    fix = (value, close[0]) if close else None
    return Problem(message=f"unknown {kind} `{value[:60]}`", where=where, hint=hint, fix=fix)


def from_text(text: str, kind: str) -> Any:
    """A flag's text as the field's type; what does not parse stays text, and is then reported."""
    try:
        if kind == "int":
            scaled = _SCALED.fullmatch(text.strip())
            if scaled:
                size = float(scaled[1]) * _SCALES[scaled[2].lower()]
                return int(size) if size.is_integer() else text
            return int(text.replace("_", ""))
        if kind == "float":
            return parse_count(text)
    except ValueError:
        return text
    if kind == "bool":
        return {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }.get(text.lower(), text)
    return text


__all__ = ["field_problems", "from_text", "sound", "unknown"]
