"""The words of a command line, before click reads them: other spellings become the option's own
name, an option given twice or unknown is a problem, and a typo gets the corrected command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence

import click

from memfit.errors import InputError, Problem
from memfit.registry import nearest
from memfit.spellings import AMBIGUOUS, Meaning, meanings, settings, switched, value

HELP = ("--help", "--help-all", "-h")


class Reader:
    """Reads the words of one command, left to right."""

    def __init__(self, params: Sequence[click.Parameter], command: str) -> None:
        options = [one for one in params if isinstance(one, click.Option)]
        self.command = command
        self.flags = {name: one for one in options for name in (*one.opts, *one.secondary_opts)}
        self.options = {one.name or "": one for one in options}
        self.spellings = meanings(frozenset((*self.options, "model")))
        self.problems: list[Problem] = []
        self.given: dict[str, tuple[str, str]] = {}  # option -> its spelling and its value

    def read(self, words: Sequence[str], stop: Callable[[str], bool]) -> list[str]:
        """`words` in the options' own names; those from `--`, or from one that `stop` picks, stay
        as they are."""
        rest, found = list(words), list[str]()
        while rest:
            word = rest.pop(0)
            if word == "--" or stop(word):
                found += [word, *rest]
                break
            if not word.startswith("-") or word == "-" or word[1:2].isdigit():
                found.append(word)
                continue
            found += self.option(word, rest, words)
        if self.problems:
            raise InputError(*self.problems)
        return found

    def option(self, word: str, rest: list[str], words: Sequence[str]) -> list[str]:
        """The words that one option becomes; its value is taken from `rest`."""
        name, equals, text = word.partition("=")
        if name in HELP:
            return [word]
        own = "--" + name.lstrip("-").replace("_", "-").lower()
        folded = own[2:]
        if name in self.flags or own in self.flags:
            name = name if name in self.flags else own
            return self.known(name, text if equals else None, rest)
        if name.lower() in ("--model", "-m"):
            return [text if equals else rest.pop(0)] if equals or rest else []
        if folded in self.spellings:
            return self.spelled(name, self.spellings[folded], text if equals else None, rest)
        self.unknown(name, folded, words)
        return []

    def known(self, name: str, text: str | None, rest: list[str]) -> list[str]:
        """An option under its own name."""
        one = self.flags[name]
        if one.is_flag:
            if text is not None and (switch := switched(text)) is not None:
                return self.switch(one, switch)
            return [name] if text is None else [f"{name}={text}"]
        if text is None and one.flag_value and (not rest or rest[0].startswith("-")):
            return [name]  # a value is optional
        if text is None and not rest:
            return [name]  # click says that a value is missing
        text = rest.pop(0) if text is None else text
        return self.valued(one, name, value(one.name or "", text))

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
        for option, chosen in sets.items():
            if option == "model":
                found.append(str(chosen))
                continue
            one = self.options[option]
            if one.is_flag:
                found += self.switch(one, bool(switched(chosen)))
            else:
                found += self.valued(one, name, str(chosen))
        return found

    def is_flag(self, option: str) -> bool:
        return option in self.options and self.options[option].is_flag

    def switch(self, one: click.Option, wanted: bool) -> list[str]:
        """The flag, its opposite, or nothing where it is off anyway."""
        if wanted:
            return [one.opts[0]]
        return [one.secondary_opts[0]] if one.secondary_opts else []

    def valued(self, one: click.Option, name: str, text: str) -> list[str]:
        """An option with its value; another value under any spelling is a problem."""
        option, own = one.name or "", one.opts[0]
        first = self.given.setdefault(option, (name, text))
        if not one.multiple and first[1] != text:
            twice = (
                f"`{name}` is given twice: `{first[1][:40]}` and `{text[:40]}`"
                if first[0] == name
                else f"`{first[0]} {first[1][:40]}` and `{name} {text[:40]}` contradict each other"
            )
            self.problems.append(Problem(message=twice, where=option, hint="keep one of them"))
            return []
        return [own, text]

    def unknown(self, name: str, folded: str, words: Sequence[str]) -> None:
        """A word that no option has: ambiguous, or a typo."""
        if folded in AMBIGUOUS:
            self.problems.append(
                Problem(message=f"`{name}` is ambiguous", hint=f"use {AMBIGUOUS[folded]}")
            )
            return
        known = [*self.flags, *(f"--{one}" for one in self.spellings if len(one) > 2)]
        close = nearest(name, known)
        hint = f"see `memfit {self.command} --help-all`"
        if close:
            right = [close[0] if word == name else word for word in words]
            right = [
                f"{close[0]}={word.partition('=')[2]}" if word.startswith(f"{name}=") else word
                for word in right
            ]
            hint = f"did you mean `{shlex.join(('memfit', self.command, *right))[:300]}`?"
        self.problems.append(Problem(message=f"unknown option `{name[:60]}`", hint=hint))


def read(
    words: Sequence[str],
    params: Sequence[click.Parameter],
    command: str,
    stop: Callable[[str], bool] = lambda word: False,
) -> list[str]:
    """`words` as click is to read them, or an InputError with everything that is wrong."""
    return Reader(params, command).read(words, stop)


def corrected(words: Sequence[str], problems: Sequence[Problem]) -> str:
    """The command with every misspelled name put right; empty if a problem has no such cure."""
    fixes = dict(fix for problem in problems if (fix := problem.fix))
    if not fixes or not all(problem.fix for problem in problems if problem.level == "error"):
        return ""
    right = [list(mended(word, fixes)) for word in words]
    changed = [pair for pair, word in zip(right, words, strict=True) if pair != [word]]
    return shlex.join(["memfit", *(word for pair in right for word in pair)]) if changed else ""


def mended(word: str, fixes: dict[str, str]) -> Iterator[str]:
    name, equals, text = word.partition("=")
    counts, _, rest = word.rpartition("x")
    if word in fixes:
        yield fixes[word]
    elif equals and text in fixes:
        yield f"{name}={fixes[text]}"
    elif counts and rest in fixes:
        yield f"{counts}x{fixes[rest]}"
    else:
        yield word


__all__ = ["corrected", "read"]
