"""What a shell would put in the place of `$(…)`, `$((…))` and `${NAME%.sh}`, where that is known
without running anything, and whether `[ … ]` holds."""

from __future__ import annotations

import fnmatch
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

MOST_COUNTED = 1000  # numbers of `seq`
GPUS = re.compile(r"nvidia-smi|cuda\.device_count|rocm-smi")
# What counts a list with commas between its parts.
COMMAS = re.compile(
    r"tr ['\"]?,['\"]? ['\"]\\n['\"]\s*\|\s*wc -l|awk -F *['\"]?,['\"]? '\{ *print NF *\}'"
)


def printed(text: str, run: Sequence[list[str]], gpus: int) -> str | None:
    """What a command line prints, whose commands before pipes are `run`, or nothing where only a
    shell knows it."""
    first = run[0] if run else [""]
    after = text.partition("|")[2].strip()
    if [one[0] for one in run] == ["cd", "pwd"]:
        return str(Path(first[-1]).resolve())
    if first[:2] in (["scontrol", "show"], ["squeue", "-j"]):
        return "localhost"
    if GPUS.search(text):
        counts = re.search(r"wc -l|device_count|grep -c|--query-gpu=count", text)
        return str(gpus) if counts else None
    if first[0] == "echo" and COMMAS.fullmatch(after):
        return str(len(" ".join(first[1:]).split(",")))
    one = re.search(r"^shuf\b.*\s(\d+)-\d+\b", text.strip())  # any of a range, most often a port
    if one:
        return one[1]
    return by_name(first[0], first[1:]) if len(run) == 1 and not after else None


def by_name(name: str, words: Sequence[str]) -> str | None:
    given = [one for one in words if not one.startswith("-")]
    numbers = [int(one) for one in given if one.isdecimal()]
    match name, given:
        case ("dirname", [path]):
            return str(Path(path).parent)
        case ("basename", [path, *ends]):
            return Path(path).name.removesuffix("".join(ends))
        case ("realpath" | "readlink", [path]):
            return str(Path(path).resolve())
        case ("echo", _):
            return " ".join(given)
        case ("which", [path]):
            return path
        case ("pwd", _):
            return str(Path.cwd())
        case ("hostname", _):
            return "localhost"
        case ("whoami", _):
            return "user"
        case ("nproc", _):
            return str(os.cpu_count() or 1)
        case ("date", _):
            form = next((one[1:] for one in words if one.startswith("+")), "%c")
            return time.strftime(form)
        case ("seq", _) if numbers and len(numbers) == len(words) < 3:
            first, last = (numbers[0], numbers[1]) if numbers[1:] else (1, numbers[0])
            return " ".join(map(str, range(first, min(last, first + MOST_COUNTED) + 1)))
    return None


def altered(value: str, change: str, plain: Callable[[str], str]) -> str | None:
    """`value` after `%end`, `#start`, `/old/new`, `:+word`, `,,`, `^^` or `:from:length`."""
    if change[:2] == ":+":
        return plain(change[2:]) if value else ""
    if change in (",,", "^^"):
        return value.lower() if change == ",," else value.upper()
    cut = re.fullmatch(r":(\d+)(?::(\d+))?", change)
    if cut:
        return value[int(cut[1]) :][: int(cut[2]) if cut[2] else None]
    ends = re.fullmatch(r"(%%?|##?)(.*)", change, re.DOTALL)
    if ends:
        return without(value, plain(ends[2]), ends[1])
    swapped = re.fullmatch(r"(//?)([^/*?\[#%][^/*?\[]*)(?:/(.*))?", change, re.DOTALL)
    if swapped:
        times = -1 if swapped[1] == "//" else 1
        return value.replace(plain(swapped[2]), plain(swapped[3] or ""), times)
    return None


def without(value: str, pattern: str, kind: str) -> str:
    """The value without its longest (`%%`, `##`) or shortest end or start like the pattern."""
    places = range(len(value) + 1)
    end = kind[0] == "%"
    longest_first = places if end == (len(kind) == 2) else reversed(places)
    for at in longest_first:
        part, rest = (value[at:], value[:at]) if end else (value[:at], value[at:])
        if fnmatch.fnmatchcase(part, pattern):
            return rest
    return value


COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
    "-lt": int.__lt__,
    "-le": int.__le__,
}
ASKED: dict[str, Callable[[str], bool]] = {
    "-z": lambda text: not text,
    "-n": bool,
    "-f": os.path.isfile,
    "-d": os.path.isdir,
    "-e": os.path.exists,
}


def truth(words: Sequence[str]) -> bool | None:
    """Whether `[ … ]`, `[[ … ]]` or `test …` holds; nothing where only a shell knows."""
    rest = [one for one in words if one not in ("[", "[[", "]", "]]", "test")]
    if len(rest) == len(words) and words[:1] not in (["true"], ["false"]):
        return None
    match rest:
        case ["!", *inner]:
            held = truth(["[", *inner])
            return None if held is None else not held
        case ["true"] | ["false"]:
            return rest == ["true"]
        case [kind, text] if kind in ASKED:
            return ASKED[kind](text)
        case [("-n" | "-z") as kind]:  # of nothing, unquoted
            return kind == "-z"
        case [first, "=" | "==", last]:
            return fnmatch.fnmatchcase(first, last)
        case [first, "!=", last]:
            return not fnmatch.fnmatchcase(first, last)
        case [first, kind, last] if kind in COMPARED and (first + last).isdecimal():
            return COMPARED[kind](int(first or 0), int(last or 0))
        case [text]:
            return bool(text)
    return None


def arithmetic(text: str, variables: Mapping[str, str]) -> str | None:
    """Of whole numbers alone."""
    plain = re.sub(
        r"\$?\{?([A-Za-z_]\w*|\$\d)\}?",
        lambda found: variables.get(found[1].lstrip("$"), "0") or "0",
        text,
    )
    whole = plain.replace("/", "//")
    if not re.fullmatch(r"[\d\s+*()%-]*(?://[\d\s+*()%-]*)*", whole) or "**" in whole:
        return None
    try:
        return str(evaluated(whole))
    except (SyntaxError, ZeroDivisionError, ValueError, RecursionError):
        return None


def evaluated(text: str) -> int:
    """`2 * (8 // 4)`, by Python's own grammar."""
    import ast
    import operator

    steps = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner)
            case ast.BinOp(left=left, op=step, right=right) if type(step) in steps:
                return int(steps[type(step)](value(left), value(right)))
        raise ValueError(text)

    return value(ast.parse(text.strip(), mode="eval").body)


__all__ = ["altered", "arithmetic", "printed", "truth"]
