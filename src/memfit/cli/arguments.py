"""The words of a command line, before click reads them: other spellings become the option's own
name, an option given twice or unknown is a problem, and a typo gets the corrected command."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Iterator, Sequence

import click

from memfit import renames
from memfit.errors import InputError, Problem
from memfit.registry import nearest
from memfit.spellings import AMBIGUOUS, Meaning, meanings, names, settings, switched, value
from memfit.unrelated_options import is_switch, unrelated
from memfit.words.options import Planning, Run, Studying, options

HELP = ("--help", "--help-all", "-h")
Stop = Callable[[str, Sequence[str]], bool]  # of a word and of those behind it
LIKE = 0.65  # similarity below which no other option is offered


class Reader:
    """Reads the words of one command, left to right."""

    def __init__(self, params: Sequence[click.Parameter], command: str) -> None:
        options = [one for one in params if isinstance(one, click.Option)]
        self.command = command
        self.flags = {name: one for one in options for name in (*one.opts, *one.secondary_opts)}
        self.options = {one.name or "": one for one in options}
        self.spellings = meanings(frozenset((*self.options, "model")))
        self.problems: list[Problem] = []
        self.given: dict[str, tuple[tuple[str, str], str]] = {}  # option -> as typed, its value

    def read(self, words: Sequence[str], stop: Stop) -> list[str]:
        """`words` in the options' own names; those from `--`, or from one that `stop` picks, stay
        as they are."""
        rest, found = list(words), list[str]()
        while rest:
            word = rest.pop(0)
            if word == "--" or stop(word, rest):
                found += [word, *rest]
                break
            if not word.startswith("-") or word == "-" or word[1:2].isdigit():
                found.append(word)
                continue
            found += self.option(word, rest)
        if self.problems:
            raise InputError(*self.problems)
        return found

    def option(self, word: str, rest: list[str]) -> list[str]:
        """The words that one option becomes; its value is taken from `rest`."""
        name, equals, text = word.partition("=")
        if name in HELP:
            return ["--help" if name == "-h" else word]
        own = "--" + name.lstrip("-").replace("_", "-").lower()
        if own not in self.flags and (new := renames.current(own[2:].replace("-", "_"))):
            own = "--" + new.replace("_", "-")
        folded = own[2:]
        if name in self.flags or own in self.flags:
            name = name if name in self.flags else own
            return self.known(name, text if equals else None, rest)
        if name.lower() in ("--model", "-m"):
            return [text if equals else rest.pop(0)] if equals or rest else []
        if folded in self.spellings:
            return self.spelled(name, self.spellings[folded], text if equals else None, rest)
        self.unknown(name, folded)
        return []

    def known(self, name: str, text: str | None, rest: list[str]) -> list[str]:
        """An option under its own name."""
        one = self.flags[name]
        if one.is_flag:
            wanted = name in one.opts if text is None else switched(text)
            if wanted is None:
                return [f"{name}={text}"]  # click says that it takes no value
            return self.switch(one, (name, name), wanted)
        optional = getattr(one, "_flag_needs_value", False)
        if text is None and optional and (not rest or rest[0].startswith("-")):
            return [name]
        if text is None and (not rest or (not one.multiple and self.is_option(rest[0]))):
            self.problems.append(Problem(message=f"`{name}` needs a value", hint=one.help or ""))
            return []
        text = rest.pop(0) if text is None else text
        return self.valued(one, (name, f"{name} {text}"), value(one.name or "", text))

    def spelled(
        self, name: str, said: tuple[Meaning, ...], text: str | None, rest: list[str]
    ) -> list[str]:
        """An option under another name."""
        needs = [one for one in said if one.yes is None and not self.is_flag(one.option)]
        form = any(one.form for one in said)
        following = rest[0] if rest else None
        if text is None and following is not None:
            number = form and following.isdecimal()
            optional = switched(following) is not None and not following.isdecimal()
            if number or optional or (needs and not form):
                text = rest.pop(0)
        if text is None and needs:
            hint = "write it like `--tp 4`" if form else "write its value behind it"
            self.problems.append(Problem(message=f"`{name}` needs a value", hint=hint))
            return []
        if text is None:
            text = "true"
        found: list[str] = []
        try:
            sets = settings(name, said, text)
        except InputError as bad:
            self.problems += bad.problems
            return []
        shown = f"{name} {text}" if needs or form else name
        for option, chosen in sets.items():
            if option == "model":
                found.append(str(chosen))
                continue
            one = self.options[option]
            if one.is_flag:
                found += self.switch(one, (name, shown), bool(switched(chosen)))
            else:
                found += self.valued(one, (name, shown), str(chosen))
        return found

    def is_flag(self, option: str) -> bool:
        return option in self.options and self.options[option].is_flag

    def is_option(self, word: str) -> bool:
        """Whether a word is an option of this command, under any of its names."""
        name = word.partition("=")[0]
        folded = name.lstrip("-").replace("_", "-").lower()
        return word.startswith("--") and (name in self.flags or folded in self.spellings)

    def switch(self, one: click.Option, typed: tuple[str, str], wanted: bool) -> list[str]:
        """The flag, its opposite, or nothing where it is off anyway; both are a problem."""
        first, said = self.given.setdefault(one.name or "", (typed, str(wanted)))
        if said != str(wanted):
            self.contradiction(one.name or "", first, typed)
            return []
        if wanted:
            return [one.opts[0]]
        return [one.secondary_opts[0]] if one.secondary_opts else []

    def valued(self, one: click.Option, typed: tuple[str, str], text: str) -> list[str]:
        """An option with its value; another value under any spelling is a problem. `typed`: the
        option, and with its value, as they were typed."""
        option, own = one.name or "", one.opts[0]
        first, said = self.given.setdefault(option, (typed, text))
        if option == "gpu" and (counted := with_count(said, text)):
            self.given[option] = (typed, counted)
            return [own, counted]
        if not one.multiple and said != text:
            twice = f"`{typed[0]}` is given twice: `{said[:40]}` and `{text[:40]}`"
            self.contradiction(option, first, typed, twice if first[0] == typed[0] else "")
            return []
        return [own, text]

    def contradiction(
        self, option: str, first: tuple[str, str], typed: tuple[str, str], message: str = ""
    ) -> None:
        """Two values of one option."""
        both = f"`{first[1][:60]}` and `{typed[1][:60]}` contradict each other"
        self.problems.append(
            Problem(message=message or both, where=option, hint="keep one of them")
        )

    def unknown(self, name: str, folded: str) -> None:
        """A word that no option has: ambiguous, or a typo."""
        if folded in AMBIGUOUS:
            self.problems.append(
                Problem(message=f"`{name}` is ambiguous", hint=f"use {AMBIGUOUS[folded]}")
            )
            return
        if self.command == "measure" and folded in ("gpu", "gpus", "memory"):
            message = f"`{name}` is not needed: `memfit measure` runs on this machine"
            self.problems.append(Problem(message=message, hint="remove it", fix=(name, "")))
            return
        if other := elsewhere(folded):
            message = f"`memfit {self.command}` has no option `{name}`"
            self.problems.append(Problem(message=message, hint=f"`memfit {other}` has it"))
            return
        if problem := unrelated(name):
            self.problems.append(problem)
            return
        known = [*self.flags, *(f"--{one}" for one in self.spellings if len(one) > 2)]
        close = nearest(name, known, 1, cutoff=LIKE) if len(folded) > 2 else []
        hint = f"did you mean `{close[0]}`?" if close else f"see `memfit {self.command} --help`"
        fix = (name, close[0]) if close else None
        self.problems.append(Problem(message=f"unknown option `{name[:60]}`", hint=hint, fix=fix))


# Lengths that are only given where a model answers.
CONTEXTS = frozenset(("context", "context-length", "ctx", "ctx-size", "num-ctx", "max-model-len"))
# Options that a question about answering may have, too: these groups, and some of the others.
ANSWERING = ("question", "quantization", "inference", "environment")
BOTH = ("attention", "batch", "image_size", "images", "precision", "seq")


def context_of(words: Sequence[str]) -> str:
    """The option that makes a question one about answering: a context, and nothing that belongs to
    training alone. Empty where there is none."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    folded = {flag: flag.lstrip("-").replace("_", "-").lower() for flag in flags}
    context = next((flag for flag, one in folded.items() if one in CONTEXTS), "")
    if not context:
        return ""
    known = options()
    table = meanings(frozenset(known))
    named = {one.replace("-", "_") for one in folded.values()} & known.keys()
    named |= {said.option for one in folded.values() for said in table.get(one, ())}
    training = {
        name
        for name in named
        if known[name].metadata["group"] not in ANSWERING and name not in BOTH
    }
    return "" if training else context


def elsewhere(folded: str) -> str:
    """Another command that has an option; empty where none has."""
    from memfit.api.serving import Answering

    own = {"trace": fields(Run), "plan": fields(Planning), "study": fields(Studying)}
    if folded in names(Answering.__dataclass_fields__):
        return "plan"
    return next((verb for verb, known in own.items() if folded in known), "")


def fields(kind: type) -> set[str]:
    """A command's own options, without the dashes before them."""
    return {one.name.replace("_", "-") for one in dataclasses.fields(kind)}


def read(
    words: Sequence[str],
    params: Sequence[click.Parameter],
    command: str,
    stop: Stop = lambda word, rest: False,
) -> list[str]:
    """`words` as click is to read them, or an InputError with everything that is wrong."""
    return Reader(params, command).read(words, stop)


def corrected(words: Sequence[str], problems: Sequence[Problem]) -> str:
    """The command with every misspelled name put right; empty if a problem has no such cure."""
    fixes = dict(fix for problem in problems if (fix := problem.fix))
    if not fixes or not all(problem.fix for problem in problems if problem.level == "error"):
        return ""
    right = [list(mended(word, fixes)) for word in kept(words, fixes)]
    typed = [word for pair in right for word in pair]
    return shlex.join(["memfit", *typed]) if typed != list(words) else ""


# memfit's options that people type behind a script, where they are the script's.
BEHIND = ("--gpu", "--gpus", "--memory", "--ranks")


def moved(words: Sequence[str], problems: Sequence[Problem]) -> str:
    """The command with memfit's own options before the script, where the script's parser refused
    them; else empty."""
    from memfit.words.models import is_program

    said = " ".join(one.message for one in problems).partition("unrecognized arguments: ")[2]
    place = next((at for at, word in enumerate(words) if is_program(word)), 0)
    if not said or words[0] != "trace" or not place:
        return ""
    own, rest, left = list[str](), list[str](), list(words[place + 1 :])
    while left:
        word = left.pop(0)
        name, equals, _ = word.partition("=")
        refused = name in BEHIND and name in said
        into = own if refused else rest
        into.append(word)
        if refused and not equals and left:
            own.append(left.pop(0))
    if not own:
        return ""
    return shlex.join(["memfit", "trace", *own, *words[1 : place + 1], *rest])


def kept(words: Sequence[str], fixes: dict[str, str]) -> Iterator[str]:
    """`words` without the options that have no use here, and without their values."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if fixes.get(name) != "":
            yield word
        elif not equals and rest and takes(name, rest[0]):
            rest.pop(0)


def takes(name: str, word: str) -> bool:
    """Whether a word is the value of an option that has no use here: after a switch, only one
    like `true` is."""
    return switched(word) is not None if is_switch(name) else not word.startswith("-")


def with_count(first: str, second: str) -> str:
    """`4xh100`, of `4` and `h100` in either order; empty if they are not a number and a GPU."""
    number, name = (first, second) if first.isdecimal() else (second, first)
    if not number.isdecimal() or name.isdecimal() or re.match(r"\d+\s*x", name):
        return ""
    from memfit.hardware.machines import find_machine

    return "" if find_machine(name) else f"{number}x{name}"


def mended(word: str, fixes: dict[str, str]) -> Iterator[str]:
    name, equals, text = word.partition("=")
    counted = re.fullmatch(r"((?:\d+x)+)(.+)", word)
    if word in fixes:
        yield from fixes[word].split()  # `4090` becomes `--gpu 4090`
    elif equals and name in fixes:
        yield f"{fixes[name]}={text}"
    elif equals and text in fixes:
        yield f"{name}={fixes[text]}"
    elif counted and counted[2] in fixes:
        yield counted[1] + fixes[counted[2]]
    else:
        yield word


__all__ = ["context_of", "corrected", "moved", "read"]
