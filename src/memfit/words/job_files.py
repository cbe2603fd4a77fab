"""Arguments from a mapping or a job file (*.yaml)."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit import spellings
from memfit.errors import InputError, Problem
from memfit.words.options import options

if TYPE_CHECKING:  # each function imports what it needs, and no more
    pass

OUTPUT = ("format", "json", "explain")  # flags that say how an answer is written
JOB_FILE_LIMIT = 2**16  # bytes: an honest job file is a hundredth of it


def given_values(
    model: Any, given: Mapping[str, Any], known: Collection[str], problems: list[Problem]
) -> tuple[Any, dict[str, Any]]:
    """The model and the options that were named, each by its own name; those of a job file where
    the model is one."""
    values = {name: value for name, value in given.items() if value is not None}
    values = spellings.plain(values, known, problems)
    if isinstance(model, (str, os.PathLike)) and os.fspath(model).lower().endswith(
        (".yaml", ".yml")
    ):
        values = {**job_file(Path(model), problems), **values}
        return values.get("model"), values
    return model, values


def job_file(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """The usable keys of a job file, written with dashes or underscores; the problems of others
    join `problems`. A model given as `./…` or `../…` is relative to the file."""
    read: dict[str, Any] = {}
    known = options()
    for key, value in mapping(path, text_of(path)).items():
        name, where = str(key).replace("-", "_"), f"{path.name}: {str(key)[:60]}"
        if name in read:
            problems.append(Problem(message=f"`{name[:60]}` is given twice", where=where))
        elif name in OUTPUT and name not in known:
            message = f"`{name}` is an option of the command line, not of a job file"
            problems.append(
                Problem(message=message, where=where, hint=f"remove it and pass `--{name}`")
            )
        elif plain(value):
            read[name] = value
        else:
            wrong = "has no value" if value is None else "must be one value or a list of values"
            problems.append(Problem(message=f"`{str(key)[:60]}` {wrong}", where=where))
    found = spellings.plain(read, known, problems, f"{path.name}: ")
    named = found.get("model")
    if named is None:
        problems.append(
            Problem(
                message="`model` is missing",
                where=path.name,
                hint="add a line like `model: meta-llama/Llama-3.1-8B`",
            )
        )
    elif isinstance(named, str) and named.startswith(("./", "../")):
        found["model"] = str(path.parent / named)
    return found


def text_of(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "not a regular file (a pipe, socket or device)"
            raise InputError.one(f"`{path}` is {what}", where="job file")
        with path.open("rb") as file:
            raw = file.read(JOB_FILE_LIMIT + 1)
        if len(raw) > JOB_FILE_LIMIT:
            raise InputError.one(
                f"`{path}` is too long for a job file",
                where="job file",
                hint=f"the limit is {JOB_FILE_LIMIT} bytes",
            )
        return raw.decode()
    except OSError as error:
        raise InputError.one(
            f"`{path}` cannot be read: {(error.strerror or 'unknown failure').lower()}",
            where="job file",
        ) from None
    except UnicodeDecodeError:
        raise InputError.one(
            f"`{path}` is not a text file", where="job file", hint="a job file is YAML in UTF-8"
        ) from None


def mapping(path: Path, text: str) -> dict[Any, Any]:
    """Parse a YAML file. A key that is given twice is a problem, and tags create no objects."""
    import yaml

    from memfit.yaml12 import loader

    try:
        node = yaml.compose(text, Loader=loader())
        keys = (
            [key.value for key, _ in node.value if isinstance(key.value, str)]
            if isinstance(node, yaml.MappingNode)
            else []
        )
        values = yaml.load(text, Loader=loader())  # noqa: S506 - a subclass of the safe one
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        message = (
            f"`{path}` is not valid YAML: "
            f"{getattr(error, 'problem', None) or 'it cannot be parsed'}"
        )
        raise InputError.one(message, where=f"job file{line}") from None
    except (RecursionError, ValueError):
        raise InputError.one(
            (
                f"`{path}` is not a job file: it is nested too deeply or has a number "
                "that is too large"
            ),
            where="job file",
        ) from None
    if not isinstance(values, dict):
        raise InputError.one(
            f"`{path}` has no keys",
            where="job file",
            hint="write lines like `model: meta-llama/Llama-3.1-8B`",
        )
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise InputError(
            *(
                Problem(message=f"`{key[:60]}` is given twice", where=f"{path.name}: {key[:60]}")
                for key in twice
            )
        )
    return values


def plain(value: Any) -> bool:
    scalar = (str, int, float, bool)
    return isinstance(value, scalar) or (
        isinstance(value, list) and all(isinstance(item, scalar) for item in value)
    )
