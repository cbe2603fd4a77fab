"""The command line: problems and exit codes. Answers go to stdout, everything else to stderr.

Exit codes: 0 it fits, 1 it does not, 2 the input is unusable, 70 memfit itself is broken, 74 the
answer cannot be written, 128 + N a signal ended it (130: Ctrl-C). `tight` is 0 with a warning; it
is 1 with `--strict`, and where the estimate itself is above what is usable.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

from memfit import renames
from memfit.api.verbs import VERBS
from memfit.cli.errors import complain, envelope, wants_json
from memfit.cli.plain import answered
from memfit.cli.routing import routed
from memfit.errors import InputError, MemfitError, Problem
from memfit.terminal import (
    Ended,
    Undelivered,
    deliver,
    ending,
    opened,
    say,
    silence,
)

FITS, DOES_NOT, UNUSABLE, BROKEN = 0, 1, 2, 70
NOT_WRITTEN, INTERRUPTED, PIPE_CLOSED = 74, 130, 141  # 70 and 74 as in BSD's sysexits.h
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is returned, never raised."""
    if arguments is None:
        opened()
    typed = list(sys.argv[1:] if arguments is None else arguments)
    with ending(), renames.listening(renamed):
        try:
            words = routed(typed, VERBS)
        except InputError as bad:
            words = ["", *typed]
            code, answer, problems = UNUSABLE, "", bad.problems
        else:
            code, answer, problems = outcome(words)
        if code <= UNUSABLE or code in (BROKEN, NOT_WRITTEN):  # Ctrl-C needs no words
            complain(problems)
        if code == UNUSABLE and (right := corrected(typed, problems)):
            say(f"try: {right}")
        if problems and wants_json(words):
            answer = envelope(words[0], problems)
        try:
            if answer:
                deliver(answer)
        except BrokenPipeError:
            return PIPE_CLOSED
        except Undelivered as error:
            message = f"the answer cannot be written to stdout: {error}"
            complain((Problem(message=message, hint="the answer was computed"),))
            return NOT_WRITTEN
        except KeyboardInterrupt:
            return INTERRUPTED
        return code


def corrected(typed: list[str], problems: Sequence[Problem]) -> str:
    """The command with what was wrong put right; empty where that is not known."""
    from memfit.cli import arguments

    return arguments.corrected(typed, problems) or arguments.moved(typed, problems)


def renamed(message: str) -> None:
    complain((Problem(message=message, level="warning"),))


def outcome(words: list[str]) -> tuple[int, str, tuple[Problem, ...]]:
    """The exit code, the answer, and what is wrong."""
    try:
        plain = answered(words)
        return by_click(words) if plain is None else (*plain, ())
    except InputError as error:
        return UNUSABLE, "", error.problems
    except MemfitError as error:
        return UNUSABLE, "", (problem_of(error),)
    except KeyboardInterrupt as end:
        return interrupted(end)
    except BrokenPipeError:  # click's own help pages
        silence(1)
        return PIPE_CLOSED, "", ()
    except OSError as error:
        if error.errno not in FULL:
            return defect(error)
        silence(1)  # what is left of a help page
        at = f": `{error.filename}`" if error.filename else ""
        message = f"cannot write{at}: {(error.strerror or 'unknown failure').lower()}"
        return NOT_WRITTEN, "", (Problem(message=message),)
    # Shown in full, under a code that no script takes for an answer
    except Exception as error:  # noqa: BLE001
        return defect(error)


def by_click(words: list[str]) -> tuple[int, str, tuple[Problem, ...]]:
    """The same by click, which knows every option, help page and shell."""
    import click

    from memfit.cli.commands import commands

    try:
        answer = commands.main(args=list(words), prog_name="memfit", standalone_mode=False)
        return (answer, "", ()) if isinstance(answer, int) else (*answer, ())
    except click.exceptions.NoArgsIsHelpError as help:
        say(help.format_message())
        return UNUSABLE, "", ()
    except click.ClickException as error:
        message = error.format_message().rstrip(".")
        message = message[:1].lower() + message[1:]
        page = "memfit" if getattr(error, "ctx", None) is None else error.ctx.command_path  # type: ignore[attr-defined]
        return UNUSABLE, "", (Problem(message=message, hint=f"see `{page} --help`"),)
    except click.exceptions.Exit as end:
        return end.exit_code, "", ()
    except click.Abort as end:
        return interrupted(end.__cause__)  # click wraps what ends it


def interrupted(by: BaseException | None) -> tuple[int, str, tuple[Problem, ...]]:
    number = by.number if isinstance(by, Ended) else INTERRUPTED - 128
    return 128 + number, "", (Problem(message="interrupted"),)


def defect(error: Exception) -> tuple[int, str, tuple[Problem, ...]]:
    import traceback

    say("".join(traceback.format_exception(error)).rstrip())
    message = f"this is a bug in memfit, not in your input: {type(error).__name__}"
    return BROKEN, "", (Problem(message=message, hint="please report it with the lines above"),)


def problem_of(error: MemfitError) -> Problem:
    message, _, hint = str(error).partition("\nhint: ")
    return Problem(message=message, hint=hint)


__all__ = ["main"]
