"""Other programs' command lines, as people paste them behind `memfit`: a serving engine's becomes
`estimate --engine`, a training script's is answered with `memfit trace`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from memfit.errors import InputError, Problem
from memfit.serving import BY_ENVIRONMENT, IMAGES, PROGRAMS, find_engine

LAUNCHERS = ("python", "python3", "accelerate", "torchrun", "deepspeed", "uv")
SCRIPTS = (".py", ".ipynb")
CONTAINERS = ("docker", "podman")
OWN = ("--gpu", "--gpus", "--memory", "--engine-version")  # memfit's options among an engine's
ENGINE = "--engine"  # may stand before such a command line
SWITCHES = ("--json", "--explain")
AHEAD = ("--offline",)  # memfit's before such a command line; within it, llama.cpp's own
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=.*")


class Pasted(NamedTuple):
    """`own` are memfit's options, `command` is the other program's command line."""

    own: list[str]
    command: list[str]


def pasted(words: Sequence[str]) -> list[str] | None:
    """The memfit command that a pasted one means; None where nothing was pasted. A script's raises
    with the command that runs it: only `memfit trace` runs code. So does a launcher's or a
    container's that starts neither."""
    found = taken_apart(words)
    if found is None:
        return None
    if len(found.command) == 1 and program(found.command[0]) in PROGRAMS:
        raise InputError(unnamed(found.command[0]))
    engine = engine_of(found.command)
    if engine:
        found = found._replace(own=without_engine(found.own, engine))
        return ["estimate", *found.own, "--engine", engine, "--", *found.command]
    script = next((word for word in found.command if word.endswith(SCRIPTS)), "")
    if script:
        raise InputError(scripted(found, script))
    raise InputError(unknown(found.command or words))


def without_engine(own: Sequence[str], engine: str) -> list[str]:
    """memfit's options without the engine that the command line starts as well."""
    rest, left = list[str](), list(own)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name == ENGINE:
            value = value if equals else left.pop(0)
            rest += [] if find_engine(value) is find_engine(engine) else [ENGINE, value]
        else:
            rest.append(word)
    return rest


def taken_apart(words: Sequence[str]) -> Pasted | None:
    """memfit's own options apart from a command line that starts another program."""
    rest, own = list(words), list[str]()
    if rest[:1] in (["estimate"], ["card"]):
        rest.pop(0)
    rest = rest[1:] if rest[:1] == ["--"] else rest
    while rest and rest[0].startswith("--"):
        taken = rest[:1] if rest[0] in AHEAD else option(rest, (*OWN, ENGINE))
        if not taken:
            return None
        own += taken
        rest = rest[len(taken) :]
        rest = rest[1:] if rest[:1] == ["--"] else rest
    if rest and re.search(r"\s", rest[0]):  # the command in quotes
        rest = [*split(rest[0]), *rest[1:]]
    if not starts(rest):
        return None
    rest = unboxed(rest)  # `docker run --gpus all` means no GPU of memfit's
    command: list[str] = []
    scripted = engine_of(rest) == ""
    while rest:
        taken = [] if scripted and command else option(rest)
        own += taken
        command += [] if taken else rest[:1]
        rest = rest[len(taken) or 1 :]
    return Pasted(own, [word for word in command if word not in ("\n", "\\")])


def option(words: Sequence[str], known: Sequence[str] = OWN) -> list[str]:
    """The words of memfit's own option at the beginning; none where there is another word."""
    name, equals, _ = words[0].partition("=")
    if name in SWITCHES or (name in known and equals):
        return [words[0]]
    return list(words[:2]) if name in known and len(words) > 1 else []


def split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote that is not closed
        return [text]


def program(word: str) -> str:
    return re.split(r"[/\\]", word)[-1].removesuffix(".exe")


def starts(words: Sequence[str]) -> bool:
    """Whether the words begin like another program's command line."""
    rest = [word for word in words if not _VARIABLE.fullmatch(word)]
    first = program(rest[0]) if rest else ""
    return first in (*PROGRAMS, *LAUNCHERS, *CONTAINERS) or first.endswith(SCRIPTS)


def engine_of(command: Sequence[str]) -> str:
    """The serving engine that a command line starts; empty where it starts none."""
    rest = [word for word in command if not _VARIABLE.fullmatch(word)]
    first = program(rest[0]) if rest else ""
    if first.startswith("python") and rest[1:2] == ["-m"] and len(rest) > 2:
        first = rest[2]
    known = (one for one in PROGRAMS if first == one or first.startswith(f"{one}."))
    return PROGRAMS.get(next(known, ""), "")


def unboxed(command: Sequence[str]) -> list[str]:
    """A command line without the variables before it, and without the container around it."""
    rest = list(command)
    if any(PROGRAMS.get(program(word)) in BY_ENVIRONMENT for word in rest):
        return rest
    while rest and _VARIABLE.fullmatch(rest[0]):
        rest.pop(0)
    if not rest or program(rest[0]) not in CONTAINERS:
        return rest
    for place, word in enumerate(rest):
        for image, begin in IMAGES.items():
            if word.partition(":")[0].endswith(image):
                return [*begin, *rest[place + 1 :]]
    return rest


def unnamed(name: str) -> Problem:
    """What to say of an engine alone."""
    return Problem(
        message=f"`{name[:40]}` is a serving engine, and no model is named",
        where="model",
        hint=f"`memfit estimate MODEL --engine {PROGRAMS[program(name)]} --gpu NAME`",
    )


def unknown(command: Sequence[str]) -> Problem:
    """What to say of a launcher or a container that starts neither an engine nor a script."""
    line = shlex.join(command)
    if program(command[0]) in CONTAINERS:
        message = "starts no serving engine that memfit knows"
        hint = f"images: {', '.join(IMAGES)}"
        if any(word.partition(":")[0] == "ollama/ollama" for word in command):
            message = "loads no model until it is asked for one"
            hint = "name it: `memfit estimate --gpu NAME -- ollama run qwen3:8b`"
    else:
        message = "names neither a serving engine nor a script"
        hint = "`memfit trace train.py` runs a script without a GPU"
        if len(command) > 1:
            hint = f"`memfit trace -- {line[:200]}` runs an installed command without a GPU"
    return Problem(message=f"`{line[:80]}` {message}", where="model", hint=hint)


def scripted(found: Pasted, script: str) -> Problem:
    """What to type for a training script."""
    command = found.command
    start = command if program(command[0]) in LAUNCHERS and command[0] != "uv" else []
    if not start or start[0].startswith("python"):
        line = command[command.index(script) :]
    else:
        line = ["--", *command]
    text = shlex.join(["memfit", "trace", *found.own, *line])
    return Problem(
        message=f"`{script[:80]}` is a script, and only `memfit trace` runs code",
        where="model",
        hint=f"`{text}` runs it without a GPU",
    )


__all__ = ["pasted"]
