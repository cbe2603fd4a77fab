"""The commands: each is built on first use, from the fields of the question that it asks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import click

from memfit import __version__
from memfit.api.verbs import VERBS, Verb
from memfit.cli import arguments as cli_arguments
from memfit.cli.errors import complain
from memfit.cli.flags import complete_model, flag, judged, output
from memfit.cli.help import EXAMPLES, Helpful, groups, write_examples
from memfit.cli.routing import is_model, modelled
from memfit.cli.run import columns, run_estimate, run_gpus, run_models, run_trace
from memfit.cli.trace import FLAGS, HELP, TraceCommand, begins_command
from memfit.errors import InputError, Problem
from memfit.job import Job
from memfit.terminal import deliver
from memfit.words.models import is_program
from memfit.words.options import Measuring, Planning, Run, Studying, options
from memfit.words.read import offer

ESTIMATE_HELP = """\
{help}.

MODEL is a hub id, folder, config.json, .safetensors or .gguf file, or a name from `memfit
models`. JOB.yaml holds `model` and any options as keys; flags override it.

Exit code: 0 fits or may fit (with --strict: fits), 1 does not fit, 2 unusable input.
"""


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
    """A GGUF file means llama.cpp, a tag Ollama, and a context a question about answering."""

    def implies_engine(self, args: Sequence[str]) -> bool:
        from memfit.cli.engine import implied_engine

        return bool(implied_engine(args))

    def meant(self, args: list[str]) -> list[str]:
        option = cli_arguments.context_of(args)
        if not option:
            return users_as_batch(args)
        message = f"`{option}` is read as a question about answering, so `--task inference`"
        hint = "for training, name a `--method`, and the length by `--seq`"
        complain((Problem(message=message, hint=hint, level="note"),))
        return users_as_batch([*args, "--task", "inference"])

    def answered(self, words: tuple[str, ...]) -> tuple[int, str]:
        from memfit.cli.engine import run

        return run(words, columns())


def users_as_batch(args: list[str]) -> list[str]:
    """`--users 8` of a question about answering as `--batch 8`, with a note."""
    words = [part for word in args for part in word.split("=", 1)]
    flags = [word for word in words if word.startswith("--")]
    answers = ("--task", "inference") in pairwise(words)
    if not answers or "--users" not in flags or "--batch" in flags:
        return args
    message = "`--users` is read as `--batch`: transformers answers all of them together"
    complain((Problem(message=message, hint="`--engine vllm` is a server", level="note"),))
    return [re.sub("^--users", "--batch", word) for word in args]


class PlanningCommand(Engines):
    """Plans the settings of a serving engine."""

    def implies_engine(self, args: Sequence[str]) -> bool:
        from memfit.cli.engine import load_named

        return load_named(args)

    def answered(self, words: tuple[str, ...]) -> tuple[int, str]:
        from memfit.cli.engine import run_plan

        return run_plan(words, columns())


class Tracing(TraceCommand, Sections):
    """Both: words that may be a script's, and headings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        def program(word: str, rest: Sequence[str]) -> bool:
            return word == "-m" or is_program(word) or begins_command(word, rest)

        ours = plain_words(self, ctx, args, "trace", program)
        return TraceCommand.parse_args(self, ctx, ours)


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
            from memfit.registry import ALIKE, nearest

            close = nearest(args[0], VERBS, cutoff=ALIKE)
            if not close and (unknown := unknown_gpu(args[0])):
                raise InputError(unknown)
            if not close and args[1:] and (is_model(args[1]) or modelled(args[1], VERBS)):
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


__all__ = ["commands"]
