"""How long the texts of a dataset are: read from a file, line by line, or drawn from a
distribution. Nothing is downloaded, and of a large file only the lengths are kept."""

from __future__ import annotations

import math
import os
import random
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from memfit.constants import counted, setting
from memfit.errors import InputError, Problem
from memfit.lazy_dataclass import dataclass
from memfit.model.sources.files import typed_path
from memfit.registry import nearest
from memfit.runs.texts import Counting, length_of
from memfit.units import parse_count

KEPT: Annotated[int, setting("lengths in memory; of more texts this many are sampled")] = 4_000_000
LONGEST_LINE: Annotated[int, setting("bytes of a line; a text of 10 M tokens has about 50 MB")] = (
    2**28
)
LONGEST_TEXT: Annotated[int, setting("tokens of a text")] = 2**32 - 1
DRAWN: Annotated[int, setting("texts of a distribution without `--examples`")] = 10_000
HEAD: Annotated[int, setting("bytes of a file in which a zero byte means a binary file")] = 4096
SHOWN = 8  # problems of one file
P99: Annotated[
    float,
    counted(
        "standard deviations that 99 % of a normal distribution lie below",
        "the inverse of its distribution function (Python statistics.NormalDist().inv_cdf(0.99))",
    ),
] = 2.3263478740408408
_KIND = re.compile(r"\s*([a-z]+)\s*:\s*(.*)", re.IGNORECASE | re.DOTALL)
_LIST = re.compile(r"\s*[0-9.]+\s*[km]?(\s*,\s*[0-9.]+\s*[km]?)*\s*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of each text, in the order of the file. `lines`: the line of each, where a file was
    read whole. `total`: texts of the file, of which `tokens` may be a sample."""

    tokens: Sequence[int]
    origin: str
    total: int
    lines: Sequence[int] = ()
    empty: int = 0

    @property
    def mean(self) -> float:
        return sum(self.tokens) / len(self.tokens)

    @property
    def longest(self) -> int:
        return max(self.tokens)

    def quantile(self, share: float) -> int:
        ordered = sorted(self.tokens)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def read_lengths(text: str, counting: Counting, *, examples: int = 0, seed: int = 0) -> Lengths:
    """`data.jsonl`, `lengths.txt`, or `lognormal:mean=400,p99=2000`."""
    if _LIST.fullmatch(text):
        raise InputError.one(
            f"`--lengths {text[:40]}` is a number: here it is a file or a distribution",
            where="lengths",
            hint="`--seq` sets one length, `memfit study --lengths 2k,8k` compares lengths",
        )
    kind = _KIND.fullmatch(text)
    if kind is not None and len(kind[1]) > 1 and not os.path.exists(text):  # noqa: PTH110 - any text
        return drawn(kind[1].lower(), kind[2], examples or DRAWN, seed)
    return from_file(typed_path(text, "lengths"), counting, seed)


# ------------------------------------------------------------------------------- distributions
class Shape(NamedTuple):
    """A distribution: its parameters, any of which pairs says all."""

    pairs: tuple[tuple[str, str], ...]
    example: str


SHAPES = {
    "lognormal": Shape(
        (("mean", "p99"), ("median", "p99"), ("mean", "median")), "lognormal:mean=400,p99=2000"
    ),
    "uniform": Shape((("min", "max"),), "uniform:min=100,max=2000"),
}


def drawn(kind: str, words: str, total: int, seed: int) -> Lengths:
    if kind not in SHAPES:
        close = nearest(kind, SHAPES, 1)
        raise InputError.one(
            f"unknown distribution `{kind[:40]}`",
            where="lengths",
            hint=f"write it like `{SHAPES[close[0] if close else 'lognormal'].example}`",
        )
    shape, problems = SHAPES[kind], list[Problem]()
    values = parameters(kind, words, problems)
    limit = values.pop("max", math.inf) if kind == "lognormal" else math.inf
    pair = next((pair for pair in shape.pairs if set(pair) == set(values)), None)
    if pair is None and not problems:
        wanted = " or ".join(" and ".join(f"`{name}`" for name in one) for one in shape.pairs)
        problems.append(wrong(f"`{kind}` needs {wanted}", f"write it like `{shape.example}`"))
    if problems:
        raise InputError(*problems)
    rng, count = random.Random(seed), min(total, KEPT)
    if kind == "uniform":
        low, high = int(values["min"]), int(values["max"])
        if low > high:
            raise InputError(wrong("`min` is above `max`", f"write it like `{shape.example}`"))
        tokens = array("I", (rng.randint(low, high) for _ in range(count)))
    else:
        middle, spread = of_lognormal(values)
        tokens = array(
            "I",
            (
                max(1, round(min(limit, LONGEST_TEXT, rng.lognormvariate(middle, spread))))
                for _ in range(count)
            ),
        )
    origin = f"{total:,} texts drawn from {kind}{sampled(count, total)}"
    return Lengths(tokens=tokens, origin=origin, total=total)


def sampled(count: int, total: int) -> str:
    return f", {count:,} of them sampled" if total > count else ""


def parameters(kind: str, words: str, problems: list[Problem]) -> dict[str, float]:
    """`mean=400,p99=2k` as numbers."""
    known = sorted({name for pair in SHAPES[kind].pairs for name in pair} | {"max"})
    found: dict[str, float] = {}
    for piece in filter(str.strip, words.split(",")):
        name, given, value = (part.strip() for part in piece.partition("="))
        name = name.lower()
        try:
            number = parse_count(value)
        except ValueError:
            number = math.nan
        if name not in known:
            listed = ", ".join(f"`{one}`" for one in known)
            problems.append(wrong(f"`{kind}` has no `{name[:40]}`", f"it has {listed}"))
        elif not given or not 1 <= number <= LONGEST_TEXT:
            problems.append(
                wrong(f"`{piece.strip()[:40]}`: must be a number of tokens, at least 1", "")
            )
        elif name in found:
            problems.append(wrong(f"`{name}` is given twice", "give it once"))
        else:
            found[name] = number
    return found


def of_lognormal(values: dict[str, float]) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm: the mean is exp(m + s²/2), the median exp(m),
    and 99 % are below exp(m + 2.326 s)."""
    low, high = sorted(values, key=("median", "mean", "p99").index)
    ratio = math.log(values[high] / values[low]) if values[high] > values[low] else -1.0
    if ratio <= 0:
        raise InputError(wrong(f"`{high}` must be above `{low}`", "long texts raise it"))
    if (low, high) == ("median", "p99"):
        spread = ratio / P99
    elif (low, high) == ("median", "mean"):
        spread = math.sqrt(2 * ratio)
    else:
        if 2 * ratio > P99**2:
            most = math.exp(P99**2 / 2)
            raise InputError(
                wrong(
                    f"no lognormal has a `p99` of {math.exp(ratio):.0f} times its mean",
                    f"at most {most:.1f} times; give the median instead of the mean",
                )
            )
        spread = P99 - math.sqrt(P99**2 - 2 * ratio)
    mean_at = "median" if "median" in values else ""
    middle = math.log(values[mean_at]) if mean_at else math.log(values["mean"]) - spread**2 / 2
    return middle, spread


def wrong(message: str, hint: str) -> Problem:
    return Problem(message=message, where="lengths", hint=hint)


# ----------------------------------------------------------------------------------------- files
def from_file(path: Path, counting: Counting, seed: int) -> Lengths:
    """Line by line; of more texts than are kept, a sample."""
    if not path.is_file():
        what = (
            "is a folder"
            if path.is_dir()
            else "is not a regular file (a pipe, socket or device)"
            if path.exists()
            else "does not exist"
        )
        hint = "give a .jsonl or .txt file, or a distribution like `lognormal:mean=400,p99=2000`"
        raise InputError(wrong(f"`{str(path)[:120]}` {what}", hint))
    tokens, lines, problems = array("I"), array("Q"), list[Problem]()
    rng, total, empty, bad = random.Random(seed), 0, 0, 0
    for number, line in numbered(path):
        try:
            length = length_of(line, counting)
        except InputError as error:
            if any(one.where == "tokenizer" for one in error.problems):
                raise  # not this line's alone
            bad += 1
            if len(problems) < SHOWN:
                problems += [
                    Problem(message=one.message, where=f"{path.name}, line {number}", hint=one.hint)
                    for one in error.problems
                ]
            if bad == total + bad >= 100:
                break  # nothing of the file can be read
            continue
        if length == 0:
            empty += 1
            continue
        total += 1
        if len(tokens) < KEPT:
            tokens.append(min(length, LONGEST_TEXT))
            lines.append(number)
        elif (place := rng.randrange(total)) < KEPT:
            tokens[place], lines[place] = min(length, LONGEST_TEXT), number
    if bad > len(problems):
        problems.append(wrong(f"and {bad - len(problems):,} more lines like these", ""))
    if problems:
        raise InputError(*problems)
    if not tokens:
        raise InputError(
            wrong(f"`{path.name}` has no texts", "a text or a length on each line is needed")
        )
    return Lengths(
        tokens=tokens,
        lines=lines,
        origin=f"{path.name}: {total:,} texts{sampled(len(tokens), total)}",
        total=total,
        empty=empty,
    )


def numbered(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of every line that is not blank."""
    try:
        with path.open("rb") as file:
            if b"\0" in file.read(HEAD):
                hint = "it must be text: JSON lines, or one length a line"
                raise InputError(wrong(f"`{path.name}` is a binary file", hint))
            file.seek(0)
            for number, raw in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
                if len(raw) == LONGEST_LINE:
                    message = f"line {number} of `{path.name}` is longer than {LONGEST_LINE} bytes"
                    raise InputError(wrong(message, "one text a line (JSON lines), not one list"))
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError:
                    hint = "save it as UTF-8"
                    raise InputError(wrong(f"`{path.name}` is not a text file", hint)) from None
                if text:
                    yield number, text
    except OSError as error:
        why = (error.strerror or "unknown failure").lower()
        raise InputError(wrong(f"`{path}` cannot be read: {why}", "")) from None
