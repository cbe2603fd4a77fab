"""Options of the command line: fields of a job as flags, what a shell may offer behind them, and
the flags of an answer's form."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import click
from click.shell_completion import CompletionItem

from memfit.api.verbs import gpus
from memfit.cli.help import default_text, describe
from memfit.report import FORMATS

TRIED = {"tries": "", "serves": " (to answer)"}  # what a plan tries of an option


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

    full = catalog.names()
    names = dict.fromkeys((*full, *(name.rpartition("/")[2] for name in full)))
    found = [CompletionItem(name) for name in names if name.lower().startswith(begun.lower())]
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


__all__ = ["complete_model", "flag", "judged", "output"]
