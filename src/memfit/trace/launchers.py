"""Commands that start a script: what a launcher would start in many processes is run in this one,
once."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import os
import re
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError, Problem
from memfit.shell_scripts import SHELLS, TRAINERS
from memfit.trace import cuda, trainer_commands

if TYPE_CHECKING:
    from memfit.trace.launched_ranks import Ranks

MODULES = {
    "torchrun": "torch.distributed.run",
    "accelerate": "accelerate.commands.accelerate_cli",
    "accelerate-launch": "accelerate.commands.launch",
}
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
PYTHON = re.compile(r"python[0-9.]*$")


def run_words(words: Sequence[str], ranks: Ranks) -> None:
    """As a shell would, where the words start a program in Python."""
    rest = [str(one) for one in words]
    while rest and (VARIABLE.match(rest[0]) or rest[0] == "env"):
        key, _, value = rest.pop(0).partition("=")
        if value or key != "env":
            os.environ[key] = value
            if key == SEARCHED:
                search(value)
        elif rest[:1] in (["-C"], ["--chdir"]) and rest[1:]:
            os.chdir(rest[1])
            rest = rest[2:]
    rest = unwrapped(rest)
    name = Path(rest[0]).name if rest else ""
    if name in MODULES:
        cuda.HERE.count = max(cuda.HERE.count, processes(rest[1:]))
        return run_launcher(MODULES[name], rest[1:], name, ranks)
    if name == "deepspeed":
        return deepspeed(rest[1:], ranks)
    if name in COUNTED:
        return counted(name, rest[1:], ranks)
    if name.endswith(".py"):
        return run_file(rest[0], rest[1:])
    if not PYTHON.match(name) and rest[0] != sys.executable:
        return run_command(name, rest[1:])
    rest = rest[1:]
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        rest = rest[2:] if rest[0] in ("-W", "-X") else rest[1:]
    if rest[:1] == ["-m"]:
        if rest[1] in (*MODULES.values(), "torch.distributed.launch"):
            return run_launcher(rest[1], rest[2:], rest[1], ranks)
        return run_module(rest[1], rest[2:])
    return run_file(rest[0], rest[1:])


SEARCHED = "PYTHONPATH"


def search(value: str) -> None:
    """Look for modules there too; an empty part is the working directory."""
    sys.path[1:1] = [one or os.getcwd() for one in value.split(os.pathsep)]


# Words that start the command behind them unchanged.
WRAPPERS = (["nohup"], ["time"], *([one, "run"] for one in ("uv", "poetry", "pdm", "pipenv")))


def unwrapped(words: list[str]) -> list[str]:
    """The command behind `nohup`, `uv run` and similar words."""
    found = next((one for one in WRAPPERS if words[: len(one)] == one), None)
    if found is None:
        return words
    rest = words[len(found) :]
    if not rest or rest[0].startswith("-"):
        message = f"`{' '.join(found)}` is followed by no command that a trace can start"
        hint = "put the command behind it, without its options, after `memfit trace --`"
        raise InputError.one(message, where="launcher", hint=hint)
    return unwrapped(rest)


def run_launcher(module: str, words: Sequence[str], name: str, ranks: Ranks) -> None:
    """What it raises before it has started the script is about its own options."""
    with reading(name, ranks):
        if not there(package := module.partition(".")[0]):
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        run_module(module, words, name, beside=False)


@contextlib.contextmanager
def reading(name: str, ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except (InputError, ImportError):
        raise
    except (Exception, SystemExit) as bad:
        if ranks.inside:
            raise
        text = "" if isinstance(bad, SystemExit) else str(bad).strip().partition("\n")[0]
        message = f"`{name}` did not accept its options" + (f": {text[:240]}" if text else "")
        raise InputError.one(message, where="launcher", hint="see its `--help`") from bad


# Launchers of whole machines: their options for numbers of processes, of those on each machine and
# of machines (mpirun(1) of Open MPI 5.0 and MPICH 4.2, srun(1) of Slurm 24.05).
MPI = {
    "size": ("-n", "-np", "--np", "--n"),
    "local": ("-ppn", "--ppn", "-npernode", "--npernode", "-N"),
    "nodes": (),
}
SLURM = {
    "size": ("-n", "--ntasks"),
    "local": ("--ntasks-per-node",),
    "nodes": ("-N", "--nodes"),
}
COUNTED = {"mpirun": MPI, "mpiexec": MPI, "srun": SLURM}
VARIABLES = {
    "rank": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "size": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"),
    "local": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
}


def counted(name: str, words: Sequence[str], ranks: Ranks) -> None:
    """MPI's and Slurm's launchers, up to the interpreter that they start."""
    place = next((place for place, one in enumerate(words) if PYTHON.match(Path(one).name)), None)
    if place is None:
        raise InputError.one(f"`{name}` starts no Python", where="launcher", hint=KNOWN)
    size, local = counts(name, words[:place])
    ranks.inside = True
    ranks.start(size, local)
    said = {"rank": ranks.rank, "size": size, "local": ranks.rank % local}
    os.environ.update({one: str(said[key]) for key, all_of in VARIABLES.items() for one in all_of})
    run_words(words[place:], ranks)


def counts(name: str, words: Sequence[str]) -> tuple[int, int]:
    """How many processes are started, and how many of them on each machine."""
    options = COUNTED[name]
    said = {
        what: value
        for what, names in options.items()
        if (value := value_of(name, words, names)) is not None
    }
    local = said.get("local", 1 if "nodes" in said else 0)
    size = said.get("size", local * said.get("nodes", 1))
    if not size:
        raise InputError.one(
            f"`{name}` does not say how many processes it starts",
            where="launcher",
            hint=f"add `{options['size'][0]} N`",
        )
    if "nodes" in said and "local" not in said:
        local = -(-size // said["nodes"])
    return size, local if "local" in said or "nodes" in said else 8 if size % 8 == 0 else size


def value_of(name: str, words: Sequence[str], options: Sequence[str]) -> int | None:
    """As `-n 4`, `-n4`, `--ntasks 4` or `--ntasks=4`."""
    found = None
    for word, following in itertools.pairwise((*words, "")):
        option, equals, value = word.partition("=")
        if option in options:
            text = value if equals else following
        elif word[:2] in options and word[2:].isdecimal():
            option, text = word[:2], word[2:]
        else:
            continue
        if not text.isdecimal() or int(text) < 1:
            raise InputError.one(
                f"`{name}` did not accept its options: `{option}` is `{text}`",
                where="launcher",
                hint="give a whole number from 1",
            )
        found = int(text)
    return found


def processes(words: Sequence[str]) -> int:
    """How many processes `accelerate launch` is told to start: its machine has as many GPUs."""
    for word, following in itertools.pairwise((*words, "")):
        name, _, value = word.partition("=")
        option = name.replace("-", "_")  # as it reads its options
        if option == "__num_processes" and (value or following).isdecimal():
            return int(value or following)
    return 1


def deepspeed(words: Sequence[str], ranks: Ranks) -> None:
    """DeepSpeed's launcher starts a process for every GPU that is named or there."""
    from deepspeed.launcher import runner

    if "-m" in itertools.takewhile(
        lambda one: not one.endswith(".py"), words
    ):  # as other launchers call it
        place = [*words].index("-m")
        words = [*words[:place], "--module", *words[place + 1 :]]
    with reading("deepspeed", ranks):
        given = runner.parse_args(list(words))
    ranks.inside = True
    local = given.num_gpus if given.num_gpus > 0 else named(given.include) or cuda.HERE.count
    ranks.start(local * max(1, given.num_nodes), local)
    own = [f"--local_rank={ranks.rank % local}"]
    if given.no_local_rank:
        own = []
    if given.module:
        return run_module(given.user_script, [*own, *given.user_args])
    return run_file(given.user_script, [*own, *given.user_args])


def named(include: str) -> int:
    """GPUs in `localhost:0,1`, DeepSpeed's `--include`."""
    return len(include.partition(":")[2].split(",")) if ":" in include else 0


def run_module(
    name: str, arguments: Sequence[str], called: str = "", *, beside: bool = True
) -> None:
    """As `python -m name arguments`, which finds modules of the working directory `beside` it. What
    a launcher starts does not: it is a process of its own."""
    sys.argv = [called or name, *arguments]
    if beside and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not there(name):
        raise InputError.one(
            f"no module `{name}` is found",
            where="script",
            hint="start memfit in the folder that holds it, or choose another `--python`",
        )
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_command(name: str, arguments: Sequence[str]) -> None:
    """As the command `name arguments` that a package has installed."""
    found = next(iter(importlib.metadata.entry_points(group="console_scripts", name=name)), None)
    if found is None:
        raise InputError(unknown_command(name, arguments))
    sys.argv = [name, *arguments]
    code = found.load()()
    if code:
        raise SystemExit(code)


def unknown_command(name: str, arguments: Sequence[str] = ()) -> Problem:
    """What is said of a command that no installed package has."""
    if name in SHELLS or name.endswith(".sh"):
        message = f"`{name}` starts a shell, and a trace runs Python programs only"
        hint = "put the command that the shell script runs behind `memfit trace --`"
    elif name in TRAINERS:
        package = TRAINERS[name]
        message = f"`{name}` is a command of the package `{package}`, which is not installed here"
        instead = trainer_commands.question(name, arguments)
        hint = f"without it ask `{instead}`; to trace it, `pip install {package}` or `--python`"
    else:
        message = (
            f"`{name}` is neither a launcher nor a command that a Python package has installed"
        )
        hint = f"known launchers are {KNOWN}; `--python` chooses the environment"
    return Problem(message=message, where="launcher", hint=hint)


def there(module: str) -> bool:
    """Whether Python finds it; looking for it imports the packages around it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as bad:
        if bad.name and f"{module}.".startswith(f"{bad.name}."):
            return False
        raise


def run_file(
    path: str,
    arguments: Sequence[str],
    home: Path | None = None,
    names: Mapping[str, Any] | None = None,
) -> None:
    """As `python path arguments`; what it imports lies beside `home`, or beside itself, and `names`
    need no import."""
    sys.argv = [path if home is None else str(home), *arguments]
    sys.path.insert(0, str((Path(path) if home is None else home).resolve().parent))
    runpy.run_path(path, dict(names or {}), run_name="__main__")


KNOWN = "torchrun, accelerate launch, deepspeed, mpirun, srun, python"
__all__ = ["run_file", "run_module", "run_words"]
