"""GPUs and prices of one's own: `~/.config/memfit/gpus.toml`, or the file that `MEMFIT_GPUS` names.

[my-a100]                       # a name of your own, or an id of `memfit gpus` to change
like = "a100-sxm-80gb"          # optional: takes from it whatever is not stated here
name = "A100 in the basement"
memory = "47.5GiB"              # what CUDA shows as the total
bandwidth = 1.6e12              # bytes/s
rates = { bf16 = 312e12 }       # dense flop/s
price = 1.25                    # dollars an hour
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from memfit.constants import setting
from memfit.errors import InputError, Problem
from memfit.hardware.gpu import GPU, MATHS, custom_gpu, find_gpu, gpu_problem, plain
from memfit.registry import nearest
from memfit.units import parse_bytes

KEYS = ("like", "name", "memory", "bandwidth", "rates", "sms", "price")
LONGEST: Annotated[int, setting("bytes of the file that are read at most")] = 2**20
LARGEST_RATE: Annotated[float, setting("flop/s, above which a rate is a typo")] = 1e20


def own_path() -> Path:
    """The file, whether or not it exists."""
    named = os.environ.get("MEMFIT_GPUS", "")
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    return (Path(named) if named else home / "memfit" / "gpus.toml").expanduser()


def own_gpus() -> Mapping[str, GPU]:
    """GPUs of the file by name; none where there is no file. All its problems are raised at
    once."""
    return _read(*_stamp())[0]


def own_prices() -> Mapping[str, float]:
    """Dollars an hour, by name."""
    return _read(*_stamp())[1]


def own_gpu(name: str) -> GPU | None:
    """The GPU of the file with that name, or None."""
    known = own_gpus()
    return next((gpu for key, gpu in known.items() if plain(key) == plain(name)), None)


def _stamp() -> tuple[Path, int]:
    """The path, with the time of its last change: a file is read once."""
    path = own_path()
    try:
        return path, path.stat().st_mtime_ns
    except OSError:
        return path, -1


@lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> tuple[dict[str, GPU], dict[str, float]]:
    if changed < 0:
        return {}, {}
    found: dict[str, GPU] = {}
    prices: dict[str, float] = {}
    problems: list[Problem] = []
    for name, row in _tables(path).items():
        wrong = list(_problems(path, name, row))
        problems += wrong
        if wrong:
            continue
        found[name] = _gpu(name, row)
        if "price" in row:
            prices[name] = float(row["price"])
    if problems:
        raise InputError(*problems)
    return found, prices


def _tables(path: Path) -> dict[str, Any]:
    where = str(path)
    if not path.is_file():
        raise InputError.one(f"`{path}` must be a file", where=where)
    try:
        with path.open("rb") as file:
            raw = file.read(LONGEST + 1)
        if len(raw) > LONGEST:
            raise InputError.one(f"`{path}` is larger than {LONGEST} bytes", where=where)
        return tomllib.loads(raw.decode())
    except OSError as error:
        raise InputError.one(
            f"`{path}` cannot be read: {(error.strerror or 'unknown failure').lower()}", where=where
        ) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError.one(
            f"`{path}` is not valid TOML: {str(error)[:120]}",
            where=where,
            hint='write tables like `[my-gpu]` with `memory = "24GiB"`',
        ) from None


def _problems(path: Path, name: str, row: Any) -> Iterator[Problem]:
    """Everything wrong with one table."""
    where = f"{path.name}: {name[:60]}"
    if not isinstance(row, dict):
        hint = f'write `[{name[:60]}]` and, below it, `memory = "24GiB"`'
        yield Problem(message=f"`{name[:60]}` must be a table", where=where, hint=hint)
        return
    for key, value in row.items():
        if key not in KEYS:
            close = nearest(key, KEYS, 1)
            hint = f"did you mean `{close[0]}`?" if close else f"keys are {', '.join(KEYS)}"
            yield Problem(message=f"unknown key `{key[:60]}`", where=where, hint=hint)
        elif problem := _value_problem(key, value, where):
            yield problem
    base = row.get("like", name)
    known = isinstance(base, str) and gpu_problem(base) is None
    if "like" in row and isinstance(base, str) and not known:
        problem = gpu_problem(base, where=f"{where}.like")
        if problem is not None:
            yield problem
    elif "memory" not in row and not known:
        hint = 'add `memory = "24GiB"`, or `like` with a GPU of `memfit gpus`'
        yield Problem(message="`memory` is missing", where=where, hint=hint)


def _value_problem(key: str, value: Any, where: str) -> Problem | None:
    place = f"{where}.{key}"
    if key in ("like", "name"):
        if not isinstance(value, str) or not value.strip():
            return Problem(message=f"`{key}` must be a text", where=place)
        return None
    if key == "memory":
        try:
            known = isinstance(value, (str, int)) and not isinstance(value, bool)
            size = parse_bytes(value, where=place) if known else 0
        except InputError as bad:
            return bad.problems[0]
        if size < 2**20:
            return Problem(
                message=f"`{str(value)[:40]}` is not an amount of memory",
                where=place,
                hint='write it like `"24GiB"`',
            )
        return None
    if key == "rates":
        wrong = [math for math in value if math not in MATHS] if isinstance(value, dict) else [key]
        if wrong or not all(map(_positive, value.values())):
            return Problem(
                message="`rates` must be a table of flop/s",
                where=place,
                hint=f"for example `{{ bf16 = 165e12 }}`; names are {', '.join(MATHS)}",
            )
        return None
    if not _positive(value):
        return Problem(message=f"`{str(value)[:40]}` must be a number above 0", where=place)
    return None


def _positive(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < LARGEST_RATE


def _gpu(name: str, row: Mapping[str, Any]) -> GPU:
    base_name = row.get("like", name)
    known = gpu_problem(base_name) is None
    size = parse_bytes(row["memory"]) if "memory" in row else 0
    base = find_gpu(base_name) if known else custom_gpu(size)
    changes: dict[str, Any] = {}
    if size:
        changes = {"memory": size, "memory_range": (size, size), "smi": None, "held": 0}
    given = {key: "given" for key in row if key in ("memory", "bandwidth", "sms")}
    if "bandwidth" in row:
        changes["bandwidth"] = float(row["bandwidth"])
    if "sms" in row:
        changes["sms"] = int(row["sms"])
    if "rates" in row:
        changes["rates"] = {**base.rates, **{key: float(one) for key, one in row["rates"].items()}}
    return replace(
        base,
        id=name,
        name=row.get("name", base.name if base.id == name else name),
        status={**base.status, **given},
        cites={**base.cites, **dict.fromkeys(given, "given in your gpus.toml")},
        **changes,
    )


__all__ = ["own_gpu", "own_gpus", "own_path", "own_prices"]
