"""Reading an engine's flags from words or from keyword arguments, all problems at once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from memfit.errors import Problem
from memfit.registry import nearest
from memfit.serving.base import Option

# vLLM reads `1k` as 1000 and `1K` as 1024 (vllm/engine/arg_utils.py human_readable_int, 0.11).
_SIZE = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)([kKmMgGtT]?)")
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
LARGEST = 1e15  # of numbers with a fraction: as GiB they are still finite
AUTO = -1  # what `auto` is among sizes (vLLM's human_readable_int_or_auto)
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


# How people write what several engines have, each by a name of its own.
SHARED = {
    "context": (
        *("--context", "--ctx", "--ctx-size", "--context-length", "--max-context", "--num-ctx"),
        *("--max-model-len", "--max-seq-len", "--max-seq-length", "--max-length", "--session-len"),
    ),
    "users": (
        *("--users", "--requests", "--concurrency", "--max-num-seqs", "--max-running-requests"),
        "--max-concurrent-requests",
    ),
    "tensor": ("--tp", "--tensor-parallel", "--tensor-parallel-size", "--num-shard"),
}


def shared_spellings(options: Sequence[Option]) -> dict[str, Option]:
    """Other spellings of this engine's options, by what they mean."""
    known = {option.means: option for option in options}
    return {word: known[what] for what in SHARED.keys() & known.keys() for word in SHARED[what]}


def read_flags(
    options: Sequence[Option],
    words: Sequence[str],
    problems: list[Problem],
    title: str,
    *,
    shared: bool = False,
) -> tuple[list[str], dict[str, Any]]:
    """The words that are no flags (models that a flag names among them), and the values of the
    flags. A flag that the engine has but memfit does not know is a problem, because it could change
    the memory. `shared`: spellings of other engines are read, too."""
    spelled = {one: option for option in options for one in option.flags}
    spelled = {**(shared_spellings(options) if shared else {}), **spelled}
    rest: list[str] = []
    values: dict[str, Any] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-") or word == "-" or _SIZE.fullmatch(word):
            rest.append(word)
            continue
        flag, equals, text = word.partition("=")
        option, negated = find_option(spelled, flag)
        if option is None:
            close = nearest(flag, spelled, 1)
            hint = f"did you mean `{close[0]}`?" if close else ""
            slots = next((one.flags[-1] for one in options if one.means == "slots"), "")
            if shared and slots and flag in SHARED["users"]:
                hint = f"`{slots} N`, which share one context"
            problems.append(
                Problem(message=f"unknown {title} option `{flag[:60]}`", where=flag, hint=hint)
            )
            at += not equals and at < len(words) and not words[at].startswith("-")
            continue
        if option.kind == "flag":
            explicit = equals or (at < len(words) and words[at].lower() in (*TRUE[:1], *FALSE[:1]))
            text, at = (text, at) if equals else (words[at], at + 1) if explicit else ("true", at)
            value = parse(option, text, flag, problems)
            values[option.name] = (not value) if negated else value
            continue
        if not equals:
            if at >= len(words):
                problems.append(Problem(message=f"`{flag}` needs a value", where=flag))
                continue
            text, at = words[at], at + 1
        if option.names_model:
            rest.append(text)
            continue
        if flag in SHARED["context"] and flag not in option.flags:
            text = text.upper()  # `8k` is 8,192, as in memfit's own options
        while option.kind == "words" and at < len(words) and not words[at].startswith("-"):
            text, at = f"{text} {words[at]}", at + 1
        value = None if option.silent else parse(option, text, flag, problems)
        if value is not None:
            values[option.name] = value
    return rest, values


def find_option(spelled: Mapping[str, Option], flag: str) -> tuple[Option | None, bool]:
    """The option that `flag` spells, with dashes or underscores, and whether it says no."""
    for one in (flag, flag.replace("_", "-")):
        if one in spelled:
            return spelled[one], False
        if one.startswith("--no-") and (option := spelled.get("--" + one[5:])):
            return (option, True) if option.kind == "flag" else (None, False)
    return None, False


def read_values(
    options: Sequence[Option], given: Mapping[str, Any], problems: list[Problem], title: str
) -> dict[str, Any]:
    """Keyword arguments, checked as flags are."""
    known = {option.name: option for option in options}
    found = {}
    for name, value in given.items():
        option = known.get(name)
        if option is None:
            close = nearest(name, known, 1)
            hint = f"did you mean `{close[0]}`?" if close else ""
            problems.append(
                Problem(message=f"unknown {title} option `{name[:60]}`", where=name, hint=hint)
            )
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        read = parse(option, text, name, problems)
        if read is not None:
            found[name] = read
    return found


def parse(option: Option, text: str, flag: str, problems: list[Problem]) -> Any:
    """The value of one option, or None and a problem."""
    if not option.supported:
        problems.append(Problem(message=f"`{flag}` is not supported yet", where=flag))
        return None
    value = value_of(option, text)
    if value is None:
        what = {
            "int": "must be an integer",
            "size": "must be an integer, like `8192` or `8k`",
            "float": "must be a number",
            "flag": "must be true or false",
            "json": "must be JSON",
        }.get(option.kind, f"must be one of {', '.join(option.choices)}")
        problems.append(Problem(message=f"`{flag} {text[:40]}` {what}", where=flag))
        return None
    if option.low is not None and value < option.low:
        what = f"must be at least {option.low:g}"
    elif option.high is not None and value > option.high:
        what = f"must be at most {option.high:g}"
    else:
        return value
    problems.append(Problem(message=f"`{flag} {text[:40]}` {what}", where=flag))
    return None


def value_of(option: Option, text: str) -> Any:
    """The value in the option's kind; None where it is none of that kind."""
    if option.kind == "flag":
        low = text.lower()
        return True if low in TRUE else False if low in FALSE else None
    if option.kind in ("int", "size"):
        if text in option.choices:
            return AUTO
        match = _SIZE.fullmatch(text)
        if match is None or (option.kind == "int" and (match[2] or "." in match[1])):
            return None
        return int(float(match[1]) * (_BINARY.get(match[2]) or _SCALES[match[2].lower()]))
    if option.kind == "float":
        try:
            number = float(text)
        except ValueError:
            return None
        return number if abs(number) < LARGEST else None  # neither NaN nor infinite
    if option.kind == "json":
        try:
            return json.loads(text)
        except ValueError:
            return None
    return text if not option.choices or text in option.choices else None
