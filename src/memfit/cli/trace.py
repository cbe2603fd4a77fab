"""`memfit trace`: which words are whose, signs of life, and the pictures of where the memory is."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from memfit.cli.errors import complain
from memfit.cli.progress import Life
from memfit.errors import InputError, Problem
from memfit.output_files import unwritable
from memfit.shell_scripts import PYTHON, STARTERS, WRAPPERS, is_shell, started
from memfit.words.models import is_program

if TYPE_CHECKING:
    from memfit.estimate import Estimate

PICTURES = (".svg", ".png", ".html")


RUNNERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
PROGRAMS = (".py", ".ipynb")


class Words(NamedTuple):
    """A command line taken apart: the model or script, what is memfit's, what is the script's."""

    subject: str
    ours: list[str]
    arguments: list[str]
    launcher: str = ""


def split(words: Sequence[str], valued: Mapping[str, bool]) -> Words:
    """`valued`: every flag of ours, and whether a value follows. Before a script all flags are
    ours, and behind it everything is its own, as behind `--`. A model may stand anywhere among
    flags. `-m package.module` is a script as it is to Python, and a launcher begins a command as
    it does behind `--`."""
    ours: list[str] = []
    arguments: list[str] = []
    subject, launcher, script = "", "", False
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name = word.partition("=")[0]
        if word == "--":
            if not subject and rest:
                subject, launcher, rest = launched(unrolled(rest, gpus(ours)))
            arguments += rest
            break
        if script:
            arguments += [word, *rest]
            break
        if word == "-m" and not subject and rest:
            subject, script = f"-m {rest.pop(0)}", True
            continue
        if not subject and begins_command(word, rest):
            subject, launcher, own = launched(unrolled([word, *rest], gpus(ours)))
            arguments += own
            break
        if word.startswith("-") and word != "-":
            ours.append(word)
            if valued.get(name) and "=" not in word and rest:
                ours.append(rest.pop(0))
        elif subject:
            arguments.append(word)
        else:
            subject, script = word, is_program(word)
    return Words(subject, ours, arguments, launcher)


def begins_command(word: str, rest: Sequence[str]) -> bool:
    """Whether a word that is no script and no option starts a program, as a shell would: a
    launcher, Python, a variable, or a command that is installed and has a word behind it, which
    no model has."""
    if not word.startswith("-") and is_shell([word, *rest]):
        return True
    if not rest or word.startswith("-") or is_program(word):
        return False
    name = Path(word).name
    if name in (*STARTERS, *WRAPPERS) or PYTHON.match(name) or is_setting(word):
        return True
    return not rest[0].startswith("-") and name == word and shutil.which(word) is not None


def gpus(ours: Sequence[str]) -> int:
    """How many GPUs our own options name, as `--gpu 8xh100` does."""
    found = re.search(r"--(?:gpu[ =](\d+)x|ranks[ =](\d+))", " ".join(ours))
    return int(found[1] or found[2]) if found else 1


def unrolled(words: Sequence[str], gpus: int = 1) -> list[str]:
    """The command that a shell script comes to, with a note that says which; other words as they
    are."""
    if not is_shell(words):
        return list(words)
    found = started(words, gpus=gpus)
    line = shlex.join(found.words)
    message = f"`{shlex.join(words)[:80]}` starts `{line[:160]}{'…' if line[160:] else ''}`"
    if found.programs > 1:
        message += f", the first of {found.programs} commands that a trace could run"
    empty = ", ".join(f"`{name}`" for name in found.unset)
    hint = f"not set, so empty: {empty}; set them before the command" if empty else ""
    complain((Problem(message=message, hint=hint, level="note"),))
    return found.words


def launched(words: Sequence[str]) -> tuple[str, str, list[str]]:
    """The script that a launcher's words start, the words before it, and the script's own; the
    launcher itself reads its words."""
    for place, word in enumerate(words):
        if word in ("-m", "--module") and place + 1 < len(words):
            if words[place + 1] in RUNNERS:
                continue
            own = list(words[place + 2 :])
            return f"-m {words[place + 1]}", before(words[:place]), own
        last = words[place - 1] if place else ""
        if word.endswith(PROGRAMS) and not (last.startswith("--config") and "=" not in last):
            return word, before(words[:place]), list(words[place + 1 :])
    for place, word in enumerate(words):
        if not is_setting(word):
            named = Path(word).name not in STARTERS and not word.startswith(("-", "python"))
            return (
                (f"-- {word}", shlex.join(words[:place]), list(words[place + 1 :]))
                if named
                else ("", shlex.join(words), [])
            )
    return "", shlex.join(words), []


def is_setting(word: str) -> bool:
    """`NAME=value` before a command, or `env`."""
    return word == "env" or (word.partition("=")[0].isidentifier() and "=" in word)


def before(words: Sequence[str]) -> str:
    """Python alone starts a script as memfit does."""
    return "" if len(words) == 1 and words[0].startswith("python") else shlex.join(words)


def outputs_wrong(timeline: str, snapshot: str) -> list[Problem]:
    """Problems with the output files, found before the trace starts."""
    found = []
    if timeline and Path(timeline).suffix.lower() not in PICTURES:
        found.append(
            Problem(
                message=f"`{timeline}` cannot be drawn",
                where="timeline",
                hint="name it *.svg, *.png or *.html",
            )
        )
    if timeline.lower().endswith(".png"):
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            found.append(
                Problem(
                    message="a PNG needs the package `matplotlib`",
                    where="timeline",
                    hint="pip install 'memfit[plot]', or name it *.svg",
                )
            )
    return [*found, *unwritable(timeline, "timeline"), *unwritable(snapshot, "snapshot")]


def traced(
    words: Words, given: Mapping[str, Any], *, timeline: str = "", snapshot: str = ""
) -> Estimate:
    """Run the trace and write the requested files."""
    from memfit.api.verbs import trace

    wrong = outputs_wrong(timeline, snapshot)
    if not words.subject and words.launcher:
        hint = "give it a script (*.py) or `-m package.module`"
        message = f"`{words.launcher[:60]}` starts no script"
        wrong.append(Problem(message=message, where="launcher", hint=hint))
    elif not words.subject:
        hint = (
            "give a hub id, a path, a name from `memfit models`, a job file (*.yaml) "
            "or a script (*.py)"
        )
        wrong.append(Problem(message="no model or script is given", where="model", hint=hint))
    if wrong:
        raise InputError(*wrong)
    life = Life()
    if words.launcher:
        given = {**given, "launcher": words.launcher}
    try:
        found = trace(words.subject, *words.arguments, progress=life, **given)
    finally:
        life.done()
    if timeline:
        from memfit.report.timeline import draw

        draw(found, Path(timeline))
    if snapshot:
        from memfit.report.snapshot import write

        write(found, Path(snapshot))
    return found


class TraceCommand(click.Command):
    """A command line that ends with a script and its own arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        valued = {
            name: not one.is_flag
            for one in self.params
            if isinstance(one, click.Option)
            for name in (*one.opts, *one.secondary_opts)
        }
        valued |= {"--help": False}
        words = split(args, valued)
        left = super().parse_args(ctx, words.ours)
        ctx.params["words"] = words
        return left


FLAGS = (
    click.Option(["--at-peak"], is_flag=True, help="list the tensors alive at the peak, by module"),
    click.Option(
        ["--timeline"],
        default="",
        metavar="FILE",
        help="draw memory over time to FILE.svg, .png or .html",
    ),
    click.Option(
        ["--snapshot"],
        default="",
        metavar="FILE",
        help="write a snapshot for pytorch.org/memory_viz",
    ),
)
HELP = """\
{help}.

SCRIPT.py runs unmodified as on that GPU: a few optimizer steps, no weights, no writes. So do `-m
package.module`, NOTEBOOK.ipynb, and the command in a shell script (train.sh). Options before the
script are memfit's; those after it are the script's.

Exit code: 0 fits or may fit, 1 does not fit, 2 unusable input.
"""

__all__ = ["FLAGS", "HELP", "TraceCommand", "Words", "begins_command", "split", "traced"]
