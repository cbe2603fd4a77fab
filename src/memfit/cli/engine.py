"""`memfit estimate --engine NAME`: the engine's own flags, or its own command line after `--`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from memfit import spellings
from memfit.cli.errors import complain, note_gpu
from memfit.errors import InputError, Problem
from memfit.report import FORMATS
from memfit.terminal import terminal_columns

FITS, DOES_NOT = 0, 1
FLAG = click.Option(
    ["--engine"],
    metavar="NAME",
    help=("serving engine, with its own flags: vllm, sglang, llama.cpp, tgi …"),
)
PLAN_FLAG = click.Option(
    ["--engine"],
    metavar="NAME",
    help="serving engine whose settings are planned, with its own flags: vllm or sglang",
)
LOAD = ("--in", "--out")
OWN = ("gpu", "gpus", "memory", "engine", "engine-version", "format")  # memfit's own, with a value
SWITCHES = ("json", "explain", "offline", "help")


def engine_named(words: Sequence[str]) -> bool:
    """Whether the words ask for a serving engine."""
    ours = words[: words.index("--")] if "--" in words else words
    return any(word == "--engine" or word.startswith("--engine=") for word in ours)


def implied_engine(words: Sequence[str]) -> str:
    """The engine that runs what the words name, where they name no job: a GGUF file, a model in one
    of ggml's quantizations, or a tag of Ollama's library. Empty for all other words."""
    from memfit.model.spellings import is_quantized
    from memfit.serving import GGUF_ENGINE, TAG_ENGINE

    _, rest, command, problems = sort_words(words)
    if len(rest) != 1 or command or problems:
        return ""
    if is_quantized(rest[0]) or rest[0].lower().endswith(".gguf"):
        return GGUF_ENGINE
    return TAG_ENGINE if in_library(rest[0]) else ""


def in_library(name: str) -> bool:
    """Whether a name is a tag of Ollama's library (`qwen3:8b`)."""
    from memfit.model.spellings import ollama_tag
    from memfit.serving.llamacpp.tags import resolve

    try:
        return ollama_tag(name) and resolve(name) is not None
    except InputError:  # a size that the library does not have
        return False


def load_named(words: Sequence[str]) -> bool:
    """Whether the words name the tokens of requests as only a plan for an engine takes them, or
    users without a task."""
    ours = words[: words.index("--")] if "--" in words else words
    named = {word.partition("=")[0] for word in ours}
    return bool(named & {*LOAD}) or ("--users" in named and not named & {"--task", "--method"})


def sort_words(
    words: Sequence[str], known: Sequence[str] = OWN
) -> tuple[dict[str, Any], list[str], list[str], list[Problem]]:
    """memfit's own options, the engine's words, the command line after `--`, and problems.
    `known`: memfit's options that take a value."""
    problems: list[Problem] = []
    own: dict[str, Any] = {}
    rest: list[str] = []
    cut = words.index("--") if "--" in words else len(words)
    ours, command = list(words[:cut]), list(words[cut + 1 :])
    while ours:
        word = ours.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if not word.startswith("--") or name not in (*known, *SWITCHES):
            rest.append(word)
            continue
        if name in SWITCHES:
            own[name] = True
            continue
        if not equals:
            if not ours:
                problems.append(Problem(message=f"`--{name}` needs a value", where=name))
                continue
            value = ours.pop(0)
        key = {"gpus": "gpu", "engine-version": "engine_version"}.get(name, name)
        if key in own:
            problems.append(Problem(message=f"`--{name}` is given twice", where=name))
        own[key] = value
    return own, rest, command, problems


def form_of(own: dict[str, Any], problems: list[Problem]) -> str:
    """The form of the answer; all problems with the options are raised."""
    form = "json" if own.pop("json", False) else str(own.pop("format", "text"))
    if form not in FORMATS:
        problems.append(
            Problem(
                message=f"unknown format `{form[:40]}`",
                where="format",
                hint=f"one of {', '.join(FORMATS)}",
            )
        )
    if problems:
        raise InputError(*problems)
    return form


def run(words: Sequence[str], width: int) -> tuple[int, str]:
    """Exit code 0: it starts. 1: it does not. Unusable input raises."""
    from memfit.api.engine import from_command
    from memfit.report.engine_answer import write
    from memfit.serving import TAG_ENGINE

    own, rest, command, problems = sort_words(words)
    form = form_of(own, problems)
    if own.pop("help", False):
        return FITS, help_page(own.get("engine", ""))
    note_gpu(str(own.get("gpu") or ""))
    engine = own.pop("engine", "")
    if not engine:
        engine = implied_engine(words)
        if engine == TAG_ENGINE:
            read = f"`{rest[0]}` is a tag of Ollama's library, so `--engine {engine}`"
            hint = "for fine-tuning, add `--method qlora`, `lora` or `full`"
            complain((Problem(message=read, where="model", hint=hint, level="note"),))
    answer = from_command(rest, command, engine, own)
    text = write(answer, form, explain=bool(own.get("explain")), width=width)
    return (FITS if answer.fits else DOES_NOT), text


def run_plan(words: Sequence[str], width: int) -> tuple[int, str]:
    """`memfit plan --engine NAME`. Exit code 0: something holds the load. 1: nothing does."""
    from memfit.api.engine_plan import CHEAPEST, OF_A_PLAN, plan_from_words
    from memfit.report.engine_plan import write
    from memfit.serving import SERVER_ENGINE

    own, rest, command, problems = sort_words(words, (*OWN, *spellings.names(OF_A_PLAN)))
    form = form_of(own, problems)
    if own.pop("help", False):
        return FITS, plan_help(own.get("engine", ""))
    means = {} if "engine" in own else {"engine": SERVER_ENGINE}
    if means and not {"gpu", "memory"} & own.keys():
        means["gpu"] = CHEAPEST
    if means:
        said = " ".join(f"--{name} {value}" for name, value in means.items())
        typed = [f"`{one}`" for one in (*LOAD, "--users") if one[2:] in own][:2]
        verb = "means" if len(typed) == 1 else "mean"
        message = f"{' and '.join(typed)} {verb} `{said}` here"
        hint = "for transformers' own generation, use `--seq` and `--new-tokens`"
        complain((Problem(message=message, hint=hint, level="note"),))
    own |= means
    note_gpu(str(own.get("gpu") or ""))
    plan = plan_from_words(rest, command, own.pop("engine"), own)
    return (FITS if plan.fits else DOES_NOT), write(plan, form, width=width)


def plan_help(name: str) -> str:
    """What a plan for an engine takes."""
    from memfit.api.engine_plan import ASKED
    from memfit.serving import find_engine

    engine = find_engine(name)
    formatter = click.HelpFormatter(width=max(60, min(120, terminal_columns())))
    formatter.write_usage("memfit plan", f"MODEL --engine {engine.name} [OPTIONS]")
    formatter.write_paragraph()
    formatter.write_text(
        f"Find settings of {engine.title} that hold a load. Its own flags are fixed where you give "
        f"them; `memfit estimate --engine {engine.name} --help` lists them."
    )
    with formatter.section("Options"):
        formatter.write_dl(
            [(f"--{key.replace('_', '-')} TEXT", text) for key, text in ASKED.items()]
        )
    return formatter.getvalue().rstrip("\n")


def help_page(name: str) -> str:
    """The help page of one engine: its own flags and memfit's."""
    from memfit.api.engine import COMMON, help_lines
    from memfit.serving import find_engine

    engine = find_engine(name)
    formatter = click.HelpFormatter(width=max(60, min(120, terminal_columns())))
    formatter.write_usage("memfit estimate", f"MODEL --engine {engine.name} [OPTIONS]")
    formatter.write_paragraph()
    formatter.write_text(f"What {engine.title} will use on a GPU, and what its log will say.")
    for title, lines in (
        (engine.title, help_lines(engine)),
        ("memfit", [(f"--{key.replace('_', '-')} TEXT", text) for key, text in COMMON.items()]),
    ):
        with formatter.section(title):
            formatter.write_dl(lines)
    return formatter.getvalue().rstrip("\n")


__all__ = ["FLAG", "PLAN_FLAG", "engine_named", "implied_engine", "run", "run_plan"]
