"""The command line: flags, columns and exit codes. Answers go to stdout, everything else to stderr.

Exit codes: 0 it fits, 1 it does not, 2 the input is unusable, 70 memfit itself is broken, 74 the
answer cannot be written, 128 + N a signal ended it (130: Ctrl-C). `tight` is 0 with a warning; it
is 1 with `--strict`, and where the estimate itself is above what is usable.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from memfit import __version__, renames
from memfit.api.verbs import VERBS, Verb, estimate, gpus, models
from memfit.cli import arguments as cli_arguments
from memfit.cli.card import is_model, routed
from memfit.cli.errors import complain, envelope, wants_json
from memfit.cli.help import EXAMPLES, Helpful, default_text, describe, groups, write_examples
from memfit.cli.trace import FLAGS, HELP, Life, TraceCommand, Words, traced
from memfit.errors import InputError, MemfitError, Problem
from memfit.job import Job
from memfit.report import FORMATS, write
from memfit.terminal import (
    Ended,
    Undelivered,
    coloured,
    deliver,
    ending,
    opened,
    say,
    silence,
    terminal_columns,
)
from memfit.words.gpus import one_model
from memfit.words.models import is_program
from memfit.words.options import Measuring, Planning, Run, Studying, options
from memfit.words.read import offer

if TYPE_CHECKING:
    from memfit.estimate import Estimate

FITS, DOES_NOT, UNUSABLE, BROKEN = 0, 1, 2, 70
NOT_WRITTEN, INTERRUPTED, PIPE_CLOSED = 74, 130, 141  # 70 and 74 as in BSD's sysexits.h
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
TRIED = {"tries": "", "serves": " (to answer)"}  # what a plan tries of an option


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
        if code == UNUSABLE and (right := cli_arguments.corrected(typed, problems)):
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


def renamed(message: str) -> None:
    complain((Problem(message=message, level="warning"),))


def outcome(words: list[str]) -> tuple[int, str, tuple[Problem, ...]]:
    """The exit code, the answer, and what is wrong."""
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
    except InputError as error:
        return UNUSABLE, "", error.problems
    except MemfitError as error:
        return UNUSABLE, "", (problem_of(error),)
    except (click.Abort, KeyboardInterrupt) as end:
        number = end.number if isinstance(end, Ended) else INTERRUPTED - 128
        return 128 + number, "", (Problem(message="interrupted"),)
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


def defect(error: Exception) -> tuple[int, str, tuple[Problem, ...]]:
    import traceback

    say("".join(traceback.format_exception(error)).rstrip())
    message = f"this is a bug in memfit, not in your input: {type(error).__name__}"
    return BROKEN, "", (Problem(message=message, hint="please report it with the lines above"),)


# ------------------------------------------------------------------------------------ the commands
def plain_words(
    command: click.Command, ctx: click.Context, args: list[str], name: str, *stop: Any
) -> list[str]:
    """`args` in the options' own names; as they are where a shell asks what may follow them."""
    try:
        return cli_arguments.read(args, command.params, name, *stop)
    except InputError:
        if not ctx.resilient_parsing:
            raise
        return args


class Sections(Helpful):
    """A command whose options have other spellings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, plain_words(self, ctx, args, self.name or ""))


class Engines(Sections):
    """`--engine NAME` hands the words to a serving engine, which owns its flags."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from memfit.cli.engine import engine_named

        if not engine_named(args) and not self.implies_engine(args):
            return super().parse_args(ctx, self.meant(args))
        ctx.params = {"engine_words": tuple(args)}
        ctx.args = []
        return []

    def implies_engine(self, args: Sequence[str]) -> bool:
        """Whether the words mean an engine that they do not name."""
        return False

    def meant(self, args: list[str]) -> list[str]:
        """`args` with the task that they mean but do not name."""
        return args

    def invoke(self, ctx: click.Context) -> Any:
        if "engine_words" not in ctx.params:
            return super().invoke(ctx)
        return self.answered(ctx.params["engine_words"])

    def answered(self, words: tuple[str, ...]) -> tuple[int, str]:
        """The exit code and the answer for an engine's words."""
        raise NotImplementedError


class Estimating(Engines):
    """A GGUF file means llama.cpp, and a context a question about answering."""

    def implies_engine(self, args: Sequence[str]) -> bool:
        from memfit.cli.engine import quantized_file

        return quantized_file(args)

    def meant(self, args: list[str]) -> list[str]:
        option = cli_arguments.context_of(args)
        if not option:
            return args
        message = f"`{option}` is read as a question about answering, so `--task inference`"
        hint = "for training, name a `--method`, and the length by `--seq`"
        complain((Problem(message=message, hint=hint, level="note"),))
        return [*args, "--task", "inference"]

    def answered(self, words: tuple[str, ...]) -> tuple[int, str]:
        from memfit.cli.engine import run

        return run(words, columns())


class PlanningCommand(Engines):
    """Plans the settings of a serving engine."""

    def answered(self, words: tuple[str, ...]) -> tuple[int, str]:
        from memfit.cli.engine import run_plan

        return run_plan(words, columns())


class Tracing(TraceCommand, Sections):
    """Both: words that may be a script's, and headings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        scripts = lambda word: word == "-m" or is_program(word)  # noqa: E731
        ours = plain_words(self, ctx, args, "trace", scripts)
        return TraceCommand.parse_args(self, ctx, ours)


def flag(
    one: dataclasses.Field[Any], *, several: bool = False, resolved: bool = False
) -> click.Option:
    """A field of `Ask` or `Job` as a flag. Its text is judged where the field is, so that all
    problems are reported at once. `several`: an option that a plan tries with several values takes
    them with commas. `resolved`: the command takes a trainer's defaults."""
    rule, name = one.metadata, one.name.replace("_", "-")
    describe(one, resolved=resolved)
    text = rule["help"]
    if rule["choices"]:
        text += ": " + ", ".join(rule["choices"])
    if several and (rule["tries"] or rule["serves"]):
        tried = [
            f"{', '.join(map(spelled_value, rule[kind]))}{words}"
            for kind, words in TRIED.items()
            if rule[kind]
        ]
        text += f" [tried: {'; '.join(tried)}]"
        made = partial(
            click.Option,
            [f"--{name}", one.name],
            metavar="TEXT",
            help=text,
            shell_complete=completion(one),
        )
        return (
            made(is_flag=False, flag_value="yes") if one.type == "bool" else made()
        )  # alone it is the flag that it is elsewhere
    if default := default_text(one, resolved=resolved):
        text += f" [default: {default}]"
    if one.type == "bool":
        both = f"--{name}/--no-{name}" if one.default else f"--{name}"
        return click.Option(
            [both, one.name],
            is_flag=True,
            default=None,
            help=text + (" [default: yes]" if one.default else ""),
        )
    kind = {"int": "N", "float": "X"}.get(str(one.type), "TEXT")
    spelled = [f"--{name}", *(["--gpus"] if one.name == "gpu" else []), one.name]
    return click.Option(
        spelled, multiple=one.name == "use", metavar=kind, help=text, shell_complete=completion(one)
    )


def spelled_value(value: Any) -> str:
    return (
        {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    )


def completion(one: dataclasses.Field[Any]) -> Any:
    """What a shell may offer behind a flag."""

    def offer(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
        known: Iterable[str] = one.metadata["choices"]
        if one.name == "gpu":
            known = ["auto", *(gpu.id for gpu in gpus())]
        elif one.name == "optimizer":
            from memfit.optimizers import OPTIMIZERS

            known = OPTIMIZERS
        return [CompletionItem(name) for name in known if name.startswith(begun)]

    return offer


def complete_model(
    ctx: click.Context, parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    from memfit.model import catalog

    found = [
        CompletionItem(name) for name in catalog.names() if name.lower().startswith(begun.lower())
    ]
    return found or [CompletionItem(begun, type="file")]


def output(*, explain: bool) -> list[click.Parameter]:
    found: list[click.Parameter] = [
        click.Option(["--json", "as_json"], is_flag=True, help="print JSON, like `--format json`")
    ]
    if explain:
        found += [
            click.Option(
                ["--format", "form"],
                type=click.Choice(FORMATS),
                default="text",
                help="output format [default: text]",
            ),
            click.Option(
                ["--explain"],
                is_flag=True,
                help="show the formula and numbers behind every part",
            ),
        ]
    return found


def judged() -> list[click.Parameter]:
    """Flags of a single answer: how exact its figures are, and its exit code."""
    return [
        click.Option(["--bytes", "exact"], is_flag=True, help="also list every figure in bytes"),
        click.Option(["--strict"], is_flag=True, help="exit with 1 where the answer is `tight`"),
    ]


def exit_code(found: Estimate, strict: bool) -> int:
    """What CI may rely on."""
    if found.verdict == "tight" and found.usable is not None:
        if strict or found.device > found.usable[0]:
            return DOES_NOT
        complain(
            (
                Problem(
                    message="tight: the upper end of the likely range is above usable memory",
                    hint="`--strict` makes this exit with 1",
                    level="warning",
                ),
            )
        )
    return FITS if found.fits else DOES_NOT


def run_estimate(
    words: tuple[str, ...],
    as_json: bool,
    form: str,
    explain: bool,
    exact: bool,
    strict: bool,
    engine: str = "",
    **given: Any,
) -> tuple[int, str]:
    form = "json" if as_json else form
    values = {name: value for name, value in given.items() if value not in (None, ())}
    life = Life()
    try:
        found = estimate(one_model(words), progress=life, **values)
    finally:
        life.done()
    return exit_code(found, strict), write(
        found, form, explain=explain, width=columns(), colour=coloured(sys.stdout), exact=exact
    )


def run_trace(
    words: Words,
    as_json: bool,
    form: str,
    explain: bool,
    at_peak: bool,
    timeline: str,
    snapshot: str,
    **given: Any,
) -> tuple[int, str]:
    form = "json" if as_json else form
    exact, strict = given.pop("exact"), given.pop("strict")
    values = {name: value for name, value in given.items() if value not in (None, ())}
    found = traced(words, values, timeline=timeline, snapshot=snapshot)
    answer = write(
        found, form, explain=explain, width=columns(), colour=coloured(sys.stdout), exact=exact
    )
    if at_peak:
        from memfit.report import peak

        if form == "json":
            answer = dumped({**json.loads(answer), "at_peak": peak.data(found)})
        else:
            table = peak.table(found, columns())
            answer += f"\n\n```\n{table}\n```" if form == "markdown" else f"\n\n{table}"
    return exit_code(found, strict), answer


def run_models(words: tuple[str, ...], as_json: bool) -> tuple[int, str]:
    from memfit.report import tables

    found = models(" ".join(words))
    return FITS, dumped(tables.models_json(found)) if as_json else tables.models(found, room())


def run_gpus(words: tuple[str, ...], as_json: bool) -> tuple[int, str]:
    from memfit.report import tables

    found = gpus(" ".join(words))
    return FITS, dumped(tables.gpus_json(found)) if as_json else tables.gpus(found, room())


def dumped(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


ESTIMATE_HELP = """\
{help}.

MODEL is a hub id, folder, config.json, .safetensors or .gguf file, or a name from `memfit
models`. JOB.yaml holds `model` and any options as keys; flags override it.

Exit code: 0 fits or may fit (with --strict: fits), 1 does not fit, 2 unusable input.
"""


class Commands(click.Group):
    """Builds each command on first use, so that no command pays for the flags of another."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        found = super().get_help_option(ctx)
        if found is not None:
            found.help = "show this page; `memfit COMMAND --help` shows that of a command"
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb.name, verb.help) for verb in VERBS.values()])
        write_examples(formatter, EXAMPLES[""])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            from memfit.registry import nearest

            close = nearest(args[0], VERBS)
            if not close and (unknown := unknown_gpu(args[0])):
                raise InputError(unknown)
            if not close and args[1:] and is_model(args[1]):
                close = ["estimate"]
            message = f"`{args[0][:60]}` is neither a command nor a model of the catalog"
            hint = offer(close) or (
                "models of the Hugging Face Hub are named `org/name`; see `memfit --help`"
            )
            fix = (args[0], close[0]) if close else None
            raise InputError(Problem(message=message, hint=hint, fix=fix))
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = VERBS.get(cmd_name)
        return None if verb is None else BUILD.get(cmd_name, listing)(verb)


def unknown_gpu(word: str) -> Problem | None:
    """What to say of a word that is almost the name of a GPU."""
    from memfit.hardware.gpu import gpu_problem

    found = gpu_problem(word)
    return found if found and found.fix else None


def sentence(verb: Verb) -> str:
    return verb.help[:1].upper() + verb.help[1:]


def subject(metavar: str = "MODEL|JOB.yaml") -> click.Argument:
    return click.Argument(
        ["words"], nargs=-1, type=click.UNPROCESSED, metavar=metavar, shell_complete=complete_model
    )


def estimating(verb: Verb) -> click.Command:
    from memfit.cli.engine import FLAG as ENGINE

    flags = [flag(one, resolved=True) for name, one in options().items() if name != "model"]
    groups["engine"] = "question"
    return Estimating(
        "estimate",
        callback=run_estimate,
        params=[subject(), ENGINE, *flags, *output(explain=True), *judged()],
        help=ESTIMATE_HELP.format(help=sentence(verb)),
        short_help=verb.help,
    )


def comparing(verb: Verb) -> click.Command:
    from memfit.cli import compare as cli_compare

    flags = [flag(one, resolved=True) for name, one in options().items() if name != "model"]
    params = [subject(), *flags, *cli_compare.FLAGS, *output(explain=True)[:2]]
    text = cli_compare.HELP.format(help=sentence(verb))
    return Sections(
        "compare",
        callback=cli_compare.runner(flags),
        params=params,
        help=text,
        short_help=verb.help,
    )


def planning(verb: Verb) -> click.Command:
    from memfit.api.plan import WITHOUT
    from memfit.api.serving import Answering
    from memfit.cli import plan as cli_plan
    from memfit.cli.engine import PLAN_FLAG

    groups["engine"] = "question"
    known = {
        **{
            one.name: one for one in (*dataclasses.fields(Planning), *dataclasses.fields(Answering))
        },
        **options(),
    }
    flags = [
        flag(one, several=True) for name, one in known.items() if name not in ("model", *WITHOUT)
    ]
    params = [subject(), PLAN_FLAG, *flags, *cli_plan.FLAGS, *output(explain=True)[:2]]
    return PlanningCommand(
        "plan",
        callback=cli_plan.run,
        params=params,
        help=cli_plan.HELP.format(help=sentence(verb)),
        short_help=verb.help,
    )


def tracing(verb: Verb) -> click.Command:
    known = {**options(), **{one.name: one for one in dataclasses.fields(Run)}}
    flags = [flag(one, resolved=True) for name, one in known.items() if name not in ("model", "by")]
    return Tracing(
        "trace",
        callback=run_trace,
        params=[*flags, *FLAGS, *output(explain=True), *judged()],
        help=HELP.format(help=sentence(verb)),
        short_help=verb.help,
        options_metavar="[OPTIONS] MODEL|SCRIPT.py [ARGUMENTS]",
    )


def measuring(verb: Verb) -> click.Command:
    from memfit.cli import measure as cli_measure

    known = {one.name: one for one in (*dataclasses.fields(Measuring), *dataclasses.fields(Job))}
    params = [
        subject("[MODEL]"),
        *map(flag, known.values()),
        *cli_measure.FLAGS,
        *output(explain=False),
    ]
    text = cli_measure.HELP.format(help=sentence(verb))
    return Sections(
        "measure", callback=cli_measure.run, params=params, help=text, short_help=verb.help
    )


def studying(verb: Verb) -> click.Command:
    from memfit.cli import study as cli_study

    job = [one for one in dataclasses.fields(Job) if one.name not in cli_study.LEFT]
    known = {one.name: one for one in (*dataclasses.fields(Studying), *job)}
    params = [
        subject("MODEL..."),
        *map(flag, known.values()),
        *cli_study.FLAGS,
        *output(explain=True)[:2],
    ]
    return Sections(
        "study",
        callback=cli_study.run,
        params=params,
        help=cli_study.HELP.format(help=sentence(verb)),
        short_help=verb.help,
    )


def carding(verb: Verb) -> click.Command:
    from memfit.cli import card as cli_card

    known = options()
    flags = [flag(known[name]) for name in ("gpu", "memory", "offline")]
    return Sections(
        "card",
        callback=cli_card.run,
        params=[subject("[MODEL]"), *flags, *output(explain=False)],
        help=cli_card.HELP.format(help=sentence(verb)),
        short_help=verb.help,
    )


def judging(verb: Verb) -> click.Command:
    from memfit.cli import accuracy as cli_accuracy

    file = click.Argument(["path"], required=False, default="", metavar="[FILE.jsonl|RECORDS]")
    text = (
        f"{sentence(verb)}: the bundled ones, those of FILE.jsonl, or the RECORDS that "
        "`memfit measure` wrote (a folder or a file)."
    )
    params = [file, *cli_accuracy.FLAGS, *output(explain=True)[:2]]
    return Sections(
        "accuracy", callback=cli_accuracy.run, params=params, help=text, short_help=verb.help
    )


def listing(verb: Verb) -> click.Command:
    pattern = click.Argument(["words"], nargs=-1, metavar="[PATTERN]")
    run = {"models": run_models, "gpus": run_gpus}[verb.name]
    text = f"{sentence(verb)}, or those whose name contains every word of PATTERN."
    return Sections(
        verb.name,
        callback=run,
        params=[pattern, *output(explain=False)],
        help=text,
        short_help=verb.help,
    )


def reporting(verb: Verb) -> click.Command:
    from memfit.cli import report as cli_report

    flags = [flag(one, resolved=True) for name, one in options().items() if name != "model"]
    return Sections(
        "report",
        callback=cli_report.run_report,
        params=[subject(), *flags, *cli_report.REPORT_FLAGS, *output(explain=False)],
        help=cli_report.REPORT_HELP.format(help=sentence(verb)),
        short_help=verb.help,
    )


def caching(verb: Verb) -> click.Command:
    from memfit.cli import report as cli_report

    return plain(verb, cli_report.run_cache, cli_report.CACHE_FLAGS, cli_report.CACHE_HELP)


def capturing(verb: Verb) -> click.Command:
    from memfit.cli import capture as cli_capture

    return plain(verb, cli_capture.run, cli_capture.PARAMETERS, cli_capture.HELP)


def making_family(verb: Verb) -> click.Command:
    from memfit.cli import new_family as cli_new_family

    return plain(verb, cli_new_family.run, cli_new_family.PARAMETERS, cli_new_family.HELP)


def plain(
    verb: Verb, run: Callable[..., Any], params: Iterable[click.Parameter], text: str
) -> click.Command:
    """A command with parameters that no other one has."""
    return Sections(
        verb.name,
        callback=run,
        params=[*params, *output(explain=False)],
        help=text.format(help=sentence(verb)),
        short_help=verb.help,
    )


BUILD: dict[str, Callable[[Verb], click.Command]] = {
    "estimate": estimating,
    "card": carding,
    "compare": comparing,
    "plan": planning,
    "trace": tracing,
    "measure": measuring,
    "study": studying,
    "accuracy": judging,
    "report": reporting,
    "cache": caching,
    "capture": capturing,
    "new-family": making_family,
}


def version(ctx: click.Context, one: click.Parameter, wanted: bool) -> None:
    if wanted:
        deliver(f"memfit {__version__}")
        ctx.exit()


commands = Commands(
    "memfit",
    help="Predict the GPU memory and time of fine-tuning and serving language models.",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=version,
            help="show the version",
        )
    ],
    epilog=(
        'Shell completion: `eval "$(_MEMFIT_COMPLETE=bash_source memfit)"`, or zsh_source, '
        "or fish_source."
    ),
)


# ------------------------------------------------------------------------------------ the terminal
def columns() -> int:
    """Of the terminal, within what can be read."""
    return max(60, min(120, terminal_columns()))


def room() -> int:
    """What a line of a list may take: that of a terminal, and of anything else as much as it needs
    (0)."""
    return terminal_columns() if sys.stdout.isatty() else 0


def problem_of(error: MemfitError) -> Problem:
    message, _, hint = str(error).partition("\nhint: ")
    return Problem(message=message, hint=hint)


__all__ = ["main"]
