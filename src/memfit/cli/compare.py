"""`memfit compare`: variants of one question, each a few flags, and their answers side by side."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Collection, Sequence
from typing import Any

import click

from memfit.api.verbs import compare
from memfit.cli import arguments as cli_arguments
from memfit.cli.routing import is_model, is_name, joined
from memfit.errors import InputError, Problem
from memfit.report.comparison import LETTERS, data, table, text
from memfit.terminal import terminal_columns
from memfit.words.gpus import is_gpu, one_model

HELP = """\
{help}.

Each `--with` is a variant: flags of `memfit estimate` in quotes. Other flags apply to all
variants. Several models are variants, too: each with every `--with`, or alone.

Exit code: 0 one fits or may fit, 1 none fits, 2 unusable input.
"""
FLAGS = (
    click.Option(
        ["--with", "variants"],
        multiple=True,
        metavar="FLAGS",
        help="a variant: its own flags, in quotes (repeat)",
    ),
)


def runner(flags: Sequence[click.Parameter]) -> Callable[..., tuple[int, str]]:
    """`flags`: those of `memfit estimate`, by which variants are read."""
    reader = click.Command("--with", params=list(flags), add_help_option=False)

    def run(
        words: tuple[str, ...], variants: tuple[str, ...], as_json: bool, form: str, **given: Any
    ) -> tuple[int, str]:
        common = {name: value for name, value in given.items() if value not in (None, ())}
        wrong: list[Problem] = []
        models = several_models(words)
        read = [variant(reader, text, wrong) for text in variants]
        labels = list(variants)
        if models:
            labels = [f"{model} {one}".strip() for model in models for one in variants or ("",)]
            read = [{"model": model, **one} for model in models for one in read or [{}]]
        if not 2 <= len(labels) <= len(LETTERS):
            message = f"{len(labels) or 'no'} variant{'' if len(labels) == 1 else 's'} to compare"
            wrong.append(
                Problem(
                    message=message,
                    where="with",
                    hint='give 2 to 26, like `--with "--use fsdp" --with "--use ddp"`, or models',
                )
            )
        if wrong:
            raise InputError(*wrong)
        subject = models[0] if models else one_model(tuple(joined([*words])))
        found = list(zip(labels, compare(subject, read, **common), strict=True))
        if as_json or form == "json":
            answer = json.dumps(data(found), indent=2, ensure_ascii=False)
        elif form == "markdown":
            answer = table(found)
        else:
            answer = text(found, width=max(60, min(160, terminal_columns())))
        return (0 if any(one.fits for _, one in found) else 1), answer

    return run


def several_models(words: Sequence[str]) -> Sequence[str]:
    """The words, where the first names a model alone; none where they name one together, as `qwen3
    8b` does, or one of them is a GPU."""
    if len(words) < 2 or is_name(words) or any(map(is_gpu, words)):
        return ()
    return words if is_model(words[0]) or is_name(words[:1]) else ()


def variant(reader: click.Command, text: str, wrong: list[Problem]) -> dict[str, Any]:
    """The options of one variant; `method=lora` is `--method lora`, as a job file's key, and so is
    each of `method=lora,batch=2`."""
    try:
        words = shlex.split(text)
        if not any(word.startswith("-") for word in words):
            known = {str(one.name) for one in reader.params}
            words = [one for word in words for one in pairs(word, known)]
        flags = cli_arguments.read(words, reader.params, "compare")
        context = reader.make_context("--with", flags, resilient_parsing=False)
    except (click.ClickException, ValueError) as error:
        said = (
            error.format_message() if isinstance(error, click.ClickException) else str(error)
        ).rstrip(".")
        message = f"`{text[:60]}`: {said[:1].lower()}{said[1:200]}"
        wrong.append(Problem(message=message, where="with", hint="use flags of `memfit estimate`"))
        return {}
    except InputError as bad:
        wrong += [dataclasses.replace(one, where="with") for one in bad.problems]
        return {}
    return {name: value for name, value in context.params.items() if value not in (None, ())}


def pairs(word: str, known: Collection[str]) -> list[str]:
    """`method=lora` and `batch=2` of `method=lora,batch=2`; a comma before a word that is no option
    belongs to the value, as in `use=tp=4,pp=2`."""
    if "=" not in word:
        return [word]
    found: list[str] = []
    for part in word.split(","):
        if found and part.partition("=")[0].replace("-", "_") not in known:
            found[-1] += f",{part}"
        else:
            found.append(f"--{part}")
    return found


__all__ = ["FLAGS", "HELP", "runner"]
