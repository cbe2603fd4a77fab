"""Shell scripts that start a training: the one command that they come to, read and not run.

Read are variables, arrays, defaults, arguments, loops over words, conditions, functions, `case`
and arithmetic; what only a shell can know, like `$(cat x)`, is refused where the command needs
it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from memfit.errors import InputError, Problem
from memfit.shell_values import altered, arithmetic, printed, truth

SHELLS = ("bash", "sh", "zsh", "dash")
# Programs that start a script, and do nothing without one.
STARTERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed", "mpirun", "mpiexec", "srun")
WRAPPERS = ("env", "nohup", "time", "uv", "poetry", "pdm", "pipenv")  # a command follows them
# Commands that train, by the package that installs them.
TRAINERS = {
    "autotrain": "autotrain-advanced",
    "axolotl": "axolotl",
    "composer": "mosaicml",
    "fabric": "lightning",
    "lightning": "lightning",
    "litgpt": "litgpt",
    "llamafactory-cli": "llamafactory",
    "nemo": "nemo_run",
    "oumi": "oumi",
    "swift": "ms-swift",
    "trl": "trl",
    "tune": "torchtune",
    "unsloth": "unsloth",
    "xtuner": "xtuner",
}
PYTHON = re.compile(r"python[0-9.]*$")
SHELL_WORDS = ("exec", "sudo")  # before a command, and nothing to a trace
BEFORE = ("env", "nohup", "time", *SHELL_WORDS)
KEYWORDS = ("do", "{", "}", "esac", "(", ")", "!")
BRANCHES = ("if", "then", "elif", "else", "fi", "while", "until", "for", "done")
MOST_TURNS = 100  # of loops whose condition is known, most often over arguments
DECLARE = ("export", "declare", "local", "readonly")
ENDS = ("&&", "||", ";;", ";", "&", "|", "\n", "(", ")")
REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>&|>|<<<|<)(?:&\d)?")
COMMAND = re.compile(r"-[a-z]*c")  # the option behind which a command is written out
HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")  # lines up to a word, which are data
NAME = re.compile(r"[A-Za-z_]\w*")
LONGEST = 1 << 16  # bytes of a script
DEEPEST = 4  # scripts that start scripts, and functions that call functions
FUNCTION = re.compile(r"(?:function\s+([\w-]+)\s*(?:\(\s*\))?|([\w-]+)\s*\(\s*\))\s*(?=\{)")
PATTERNS = re.compile(r"(?:\s|#[^\n]*\n)*\(?([^()\n]*)\)")  # of a branch of `case`
UNKNOWN = "\0"  # before the text of what only a shell knows


class Started(NamedTuple):
    """A command of a shell script with its variables in front, how many such commands the script
    has, and the variables that are not set."""

    words: list[str]
    programs: int
    unset: tuple[str, ...] = ()


def is_shell(words: Sequence[str]) -> bool:
    """Whether the words start a shell script, or a shell with a command."""
    rest = without_settings(words)
    if not rest:
        return False
    name = Path(rest[0]).name
    return name.endswith(".sh") or (name in SHELLS and len(rest) > 1)


def started(words: Sequence[str], depth: int = 0, gpus: int = 1) -> Started:
    """The command that `words` come to: `bash train.sh 8` starts what `train.sh` starts, on a
    machine with so many GPUs."""
    before = list(words[: len(words) - len(without_settings(words))])
    rest = without_settings(words)
    variables = dict(os.environ) | dict(one.split("=", 1) for one in before if "=" in one)
    text, name, arguments = source(rest)
    known = {str(at): one for at, one in enumerate((name, *arguments))}
    reader = Reader(text, {**variables, **known}, arguments)
    reader.shared.gpus = gpus
    reader.arrays["BASH_SOURCE"] = [name]
    try:
        found = list(commands(reader))
    except RecursionError:
        message = f"`{name}` has too many values within each other"
        raise InputError.one(message, where="launcher") from None
    if not found:
        raise InputError.one(
            f"`{name}` starts no program that a trace can run",
            where="launcher",
            hint="put the command that trains behind `memfit trace --`",
        )
    first = [*before, *found[0]]
    unread = next((one for one in first if UNKNOWN in one), "")
    if unread:
        shown = unread.partition(UNKNOWN)[2].partition(UNKNOWN)[0]
        raise InputError.one(
            f"`{name}` needs a shell for `{shown[:60]}`",
            where="launcher",
            hint="put its command, with that value, behind `memfit trace --`",
        )
    if is_shell(first):
        if depth == DEEPEST:
            message = f"`{name}` starts itself, or too many scripts one after the other"
            raise InputError.one(message, where="launcher")
        inner = started(first, depth + 1, gpus)
        return Started(inner.words, inner.programs, (*reader.unset, *inner.unset))
    return Started(first, len(found), tuple(reader.unset))


def source(words: Sequence[str]) -> tuple[str, str, list[str]]:
    """The text of a script or of `-c`, its name, and its arguments."""
    rest = list(words)
    name = rest.pop(0)
    if Path(name).name in SHELLS:
        while rest and rest[0].startswith("-") and not COMMAND.fullmatch(rest[0]):
            rest.pop(0)
        if rest and COMMAND.fullmatch(rest[0]):
            text = rest[1] if rest[1:] else ""
            return text, f"{name} -c", rest[2:]
        name = rest.pop(0) if rest else name
    path = Path(name)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError.one(f"`{name[:160]}` is not a regular file", where="launcher")
        if path.stat().st_size > LONGEST:
            raise InputError.one(f"`{name[:160]}` is too long for a shell script", where="launcher")
        return path.read_text(errors="replace"), name, rest
    except OSError as bad:
        reason = (bad.strerror or "unknown failure").lower()
        message = f"`{name[:160]}` cannot be read: {reason}"
        raise InputError(Problem(message=message, where="launcher")) from None


def without_settings(words: Sequence[str]) -> list[str]:
    """The words behind variables and wrappers."""
    rest = list(words)
    while rest and (rest[0] in BEFORE or setting(rest[0])):
        rest.pop(0)
    return rest


def setting(word: str) -> bool:
    """`NAME=value`."""
    return "=" in word and NAME.fullmatch(word.partition("=")[0]) is not None


def starts(words: Sequence[str]) -> bool:
    """Whether a command starts a program that a trace can run."""
    rest = without_settings(words)
    if rest[:2] in (["uv", "run"], ["poetry", "run"], ["pdm", "run"], ["pipenv", "run"]):
        rest = without_settings(rest[2:])
    if not rest:
        return False
    name = Path(rest[0]).name
    if PYTHON.match(name):
        return any(one.endswith(".py") or one == "-m" for one in rest[1:]) and not installs(rest)
    return name in (*STARTERS, *TRAINERS) or name.endswith((".py", ".sh")) or is_shell(rest)


def installs(words: Sequence[str]) -> bool:
    """`python -m pip install` and `python setup.py install` train nothing."""
    return any(one in ("pip", "setup.py", "venv") for one in words[:4])


class Branches:
    """Conditions and loops around what is read: a branch that does not run is passed over, and all
    are read where only a shell knows which one runs."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        # For each condition and loop: whether its lines run, whether a branch of it has run, and
        # where a loop begins.
        self.open: list[tuple[bool | None, bool | None, int]] = []
        self.condition: list[bool | None] | None = None  # the one that is being read
        self.after: bool | None = None  # what holds of the next command, behind `&&` and `||`
        self.turns = MOST_TURNS

    def passes(self, words: list[str], end: str) -> bool:
        """Whether to pass over a command; keywords are taken out of `words`."""
        while words and (words[0] in KEYWORDS or words[0] in BRANCHES):
            word = words.pop(0)
            self.keyword(word, words, end)
            if word == "for":  # which sets a variable
                words.insert(0, word)
                break
        if self.condition is not None:
            self.condition.append(None if end in ("&&", "||", "|") else truth(words))
            return True
        if any(one[0] is False for one in self.open) or self.after is False:
            self.after = self.after if end == "&&" else None
            return True
        held = truth(words)
        self.after = {"&&": held, "||": None if held is None else not held}.get(end)
        return not words

    def keyword(self, word: str, words: list[str], end: str) -> None:
        if word == "if":
            self.open.append((True, False, 0))
            self.condition = []
        elif word in ("while", "until", "for"):
            held = truth(words) if word == "while" and end in (";", "\n") else None
            start = self.reader.began if held else 0
            self.open.append((held, None, start))
        elif word in ("elif", "else") and self.open:
            done = self.open[-1][1]
            self.open[-1] = (None if done is None else not done, done, 0)
            self.condition = [] if word == "elif" else None
        elif word in ("fi", "done") and self.open:
            held, _, start = self.open.pop()
            if word == "done" and held and start and self.turns:
                self.turns -= 1
                self.reader.at = start
        elif word == "then" and self.condition is not None and self.open:
            held = self.condition[0] if len(self.condition) == 1 else None
            self.condition = None
            runs, done, _ = self.open[-1]
            if runs is not False:
                self.open[-1] = (held, None if held is None or done is None else held or done, 0)


def commands(reader: Reader, depth: int = 0) -> Iterator[list[str]]:
    """The commands of a script that start a program, with their variables expanded; a loop over
    words runs with the first of them."""
    shared, branches = reader.shared, Branches(reader)
    for words in reader.commands():
        if branches.passes(words, reader.ended):
            continue
        name, *rest = words
        values = dict(one.split("=", 1) for one in words if setting(one))
        if name in (*DECLARE, "set"):
            reader.variables |= values
            shared.exported |= values if name == "export" else {}
        elif name == "for" and len(words) > 3 and words[2] == "in":
            reader.variables[words[1]] = words[3]
        elif name == "read" and rest and reader.given:
            lines = reader.given if "-d" in rest else reader.given.partition("\n")[0]
            reader.variables[rest[-1]] = lines.strip()
        elif name == "shift":
            reader.shift(int(rest[0]) if rest and rest[0].isdecimal() else 1)
        elif name in ("cd", "pushd") and rest:
            shared.go(rest[-1])
        elif all(map(setting, words)):
            reader.variables |= values
            shared.exported |= {key: one for key, one in values.items() if key in shared.exported}
        elif name == "eval" and depth < DEEPEST:
            yield from commands(reader.inner(" ".join(rest), reader.arguments), depth + 1)
        elif name in shared.functions and depth < DEEPEST:
            inner = reader.inner(shared.functions[name], rest)
            inner.shift(0)
            yield from commands(inner, depth + 1)
            reader.shift(0)
        elif starts(words):
            own = [one for one in words if one not in SHELL_WORDS]
            away = ["env", "-C", shared.folder] if shared.folder not in ("", ".") else []
            yield [*away, *(f"{key}={one}" for key, one in shared.exported.items()), *own]


class Shared:
    """What a script and its functions have in common."""

    def __init__(self) -> None:
        self.functions: dict[str, str] = {}
        self.exported: dict[str, str] = {}
        self.folder = ""  # where `cd` has gone
        self.gpus = 1

    def go(self, folder: str) -> None:
        path = Path(self.folder, folder).expanduser()
        self.folder = os.path.normpath(path) if path.is_dir() else self.folder


class Reader:
    """Words of a script, command by command, as a shell splits them."""

    def __init__(self, text: str, variables: dict[str, str], arguments: list[str]) -> None:
        self.text, self.at = text.replace("\\\r\n", "").replace("\\\n", ""), 0
        self.variables, self.arguments = {"RANDOM": "10000", **variables}, arguments
        self.arrays: dict[str, list[str]] = {}
        self.unset: dict[str, None] = {}
        self.shared = Shared()
        self.began, self.ended = 0, ""  # where the last command begins, and what is behind it
        self.cases = 0  # that are open
        self.given = ""  # lines that the last command got as its input

    def inner(self, text: str, arguments: list[str]) -> Reader:
        """Of a function's text or of one that is evaluated: variables are the same ones."""
        found = Reader(text, {}, arguments)
        found.variables, found.arrays = self.variables, self.arrays
        found.unset, found.shared = self.unset, self.shared
        return found

    def shift(self, count: int = 1) -> None:
        """Leave out the first arguments; 0 makes the reader's own arguments `$1` to `$9`."""
        self.arguments = self.arguments[count:]
        places = dict.fromkeys(map(str, range(1, 10)), "")
        self.variables |= places | {str(at): one for at, one in enumerate(self.arguments, 1)}

    def commands(self) -> Iterator[list[str]]:
        words: list[str] = []
        skip = False  # what a pipe ends in, or a file that the output goes to
        piped = False
        while self.at < len(self.text):
            end = next((one for one in ENDS if self.text.startswith(one, self.at)), "")
            redirected = REDIRECTION.match(self.text, self.at)
            data = HERE.match(self.text, self.at)
            function = None if words else FUNCTION.match(self.text, self.at)
            if not words and not self.text[self.at].isspace():
                self.began = self.at if self.ended else 0
            if data:
                self.pass_over(data)
            elif function:
                body = balanced(self.text[function.end() :], 0, "{}")
                self.shared.functions[function[1] or function[2]] = body[1:-1]
                self.at = function.end() + len(body)
            elif end:
                self.at += len(end)
                self.ended = end
                if words and not piped:
                    yield words
                words, piped = [], end == "|"
                if end == ";;" and self.cases:
                    self.pass_branches(None)
            elif self.text[self.at] in " \t\r":
                self.at += 1
            elif self.text[self.at] == "#":
                self.at = self.line_end()
            elif redirected and (redirected[0][0] in "<>&" or redirected[0][0].isdecimal()):
                self.at = redirected.end()
                skip = not redirected[0][-1:].isdecimal()
            else:
                found = self.word(words)
                words += [] if skip else found
                skip = False
                if words[0:1] == ["case"] and words[-1] == "in":
                    self.cases += 1
                    value, words = " ".join(words[1:-1]), []
                    self.pass_branches(value)
        self.ended = ""
        if words and not piped:
            yield words

    def pass_branches(self, value: str | None) -> None:
        """Go to the branch of `case` that is for this value, or behind its end."""
        while self.at < len(self.text):
            found = PATTERNS.match(self.text, self.at)
            if value is not None and found and found[1].strip() != "esac":
                self.at = found.end()
                if UNKNOWN in value or any(
                    fnmatchcase(value, self.plain(one.strip())) for one in found[1].split("|")
                ):
                    return
            end = re.compile(r";;" if value is not None else r"\besac\b").search(self.text, self.at)
            last = re.compile(r"\besac\b").search(self.text, self.at)
            if end is None or (last and last.start() < end.start()):
                end = last
            self.at = len(self.text) if end is None else end.end()
            if end is None or end[0] == "esac":
                self.cases -= 1
                return

    def pass_over(self, data: re.Match[str]) -> None:
        """Take out the lines that a command is given as its input, and keep what they say."""
        self.at = data.end()
        begins = self.line_end() + 1
        last = re.compile(rf"^\t*{data[2]}$", re.MULTILINE).search(self.text, begins)
        lines = self.text[begins : None if last is None else last.start()]
        self.given = lines if data[1] else self.plain('"' + lines.replace('"', '\\"') + '"')
        self.text = self.text[:begins] + ("" if last is None else self.text[last.end() :])

    def line_end(self) -> int:
        found = self.text.find("\n", self.at)
        return len(self.text) if found < 0 else found

    def word(self, before: Sequence[str]) -> list[str]:
        """The words that one word of the script expands to: an unquoted variable may hold
        several, and an array in full as many as it has."""
        parts: list[tuple[str, bool]] = []
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in " \t\r\n;&|()<>" and not self.opens_array(parts, before):
                break
            if letter == "(":
                return self.array(parts)
            if letter == "\\":
                parts.append((self.text[self.at + 1 : self.at + 2], True))
                self.at += 2
            elif letter == "'":
                end = self.text.find("'", self.at + 1)
                end = len(self.text) if end < 0 else end
                parts.append((self.text[self.at + 1 : end], True))
                self.at = end + 1
            elif letter == '"':
                parts += self.quoted()
            elif letter in "$`":
                parts.append((self.expansion(), False))
            else:
                parts.append((letter, True))
                self.at += 1
        first = all(map(setting, before)) or before[0] in DECLARE
        text = "".join(one for one, _ in parts)
        if first and setting(text) and ARRAY not in text and EMPTY not in text:
            return [text]  # the value of a variable is not split
        return self.joined(parts)

    def opens_array(self, parts: Sequence[tuple[str, bool]], before: Sequence[str]) -> bool:
        """`NAME=(`."""
        named = "".join(one for one, _ in parts).rstrip("+")
        first = not before or before[0] in DECLARE
        opened = self.text[self.at] == "(" and named.endswith("=")
        return first and opened and NAME.fullmatch(named.rstrip("=+")) is not None

    def array(self, parts: Sequence[tuple[str, bool]]) -> list[str]:
        typed = "".join(one for one, _ in parts)
        name = typed.rstrip("=").rstrip("+")
        found = self.arrays.get(name, []) if typed.endswith("+=") else []
        self.at += 1
        values = list(found)
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in " \t\r\n":
                self.at += 1
            elif self.text[self.at] == "#":
                self.at = self.line_end()
            else:
                start = self.at
                values += self.word(("in an array",))
                self.at += self.at == start
        self.at += 1
        self.arrays[name] = values
        return []

    def quoted(self) -> list[tuple[str, bool]]:
        self.at += 1
        parts: list[tuple[str, bool]] = [("", True)]
        while self.at < len(self.text) and self.text[self.at] != '"':
            letter = self.text[self.at]
            if letter == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\"):
                parts.append((self.text[self.at + 1], True))
                self.at += 2
            elif letter in "$`":
                parts.append((self.expansion(), True))
            else:
                parts.append((letter, True))
                self.at += 1
        self.at += 1
        return parts

    def expansion(self) -> str:
        """The value of what begins here; the words of an array are joined by a mark."""
        rest = self.text[self.at :]
        if rest.startswith("$(("):
            inside = balanced(rest, 1, "()")
            number = arithmetic(self.plain(inside[3:-2]), self.variables)
            return self.taken(inside, f"{UNKNOWN}{inside}{UNKNOWN}" if number is None else number)
        if rest.startswith("$("):
            return self.taken(inside := balanced(rest, 1, "()"), self.known(inside))
        if rest.startswith("`"):
            end = rest.find("`", 1)
            return self.taken(rest[: end + 1], self.known(rest[: end + 1]))
        if rest.startswith("${"):
            inside = balanced(rest, 1, "{}")
            return self.taken(inside, self.value(inside[2:-1]))
        found = re.match(r"\$([A-Za-z_]\w*|[0-9@*#])", rest)
        if found is None:
            return self.taken("$", "$")
        return self.taken(found[0], self.value(found[1]))

    def taken(self, text: str, value: str) -> str:
        self.at += max(1, len(text))
        return value

    def known(self, text: str) -> str:
        """What a command would print, where that is known without a shell."""
        inner = text[1:-1] if text[0] == "`" else text[2:-1]
        run = list(self.inner(inner, self.arguments).commands())
        unknown = any(UNKNOWN in word for words in run for word in words)
        found = None if unknown else printed(inner, run, self.shared.gpus)
        return f"{UNKNOWN}{text}{UNKNOWN}" if found is None else found

    def plain(self, text: str) -> str:
        """A text with its variables expanded, in quotes or not."""
        if text[:1] == "'" == text[-1:]:
            return text[1:-1]
        bare = text[1:-1] if len(text) > 1 and text[0] == '"' == text[-1] else text
        inner = Reader(bare, self.variables, self.arguments)
        inner.arrays = self.arrays
        return "".join(one for one, _ in inner.quoted_text())

    def value(self, name: str) -> str:
        """Of `NAME`, `NAME:-default`, `NAME[@]`, `@` and `#`."""
        if name in ("@", "*"):
            return ARRAY.join(self.arguments) or EMPTY
        if name == "#":
            return str(len(self.arguments))
        listed = re.fullmatch(r"(#?)([A-Za-z_]\w*)\[([@*]|\d+|\$?[A-Za-z_]\w*)\]", name)
        if listed:
            at = listed[3].lstrip("$")
            at = self.variables.get(at, "0") if NAME.fullmatch(at) else at
            some = self.arrays.get(listed[2], [])
            if listed[1]:
                return str(len(some))
            if at.isdecimal():
                return some[int(at)] if int(at) < len(some) else ""
            return ARRAY.join(some) or EMPTY
        found = re.fullmatch(r"([A-Za-z_]\w*|\d|[@*])(?:(:?[-=])(.*))?", name, re.DOTALL)
        if found is None:
            other = re.fullmatch(r"([A-Za-z_]\w*|\d)(\W.*)", name, re.DOTALL)
            change = other[2] if other else ""
            change = f":{change}" if change[:1] == "+" else change
            held = self.variables.get(other[1], "") if other else ""
            changed = altered(held, change, self.plain)
            return f"{UNKNOWN}${{{name}}}{UNKNOWN}" if changed is None else changed
        if found[1] in "@*" and self.arguments:
            return ARRAY.join(self.arguments)
        value = self.variables.get(found[1])
        if value is None and found[1] in self.arrays:
            return next(iter(self.arrays[found[1]]), "")
        if found[2] and (value is None or (not value and found[2].startswith(":"))):
            return self.plain(found[3])
        if value is None and not found[1].isdecimal():
            self.unset[found[1]] = None
        return value or ""

    def quoted_text(self) -> list[tuple[str, bool]]:
        """The whole text as between double quotes."""
        self.text, self.at = f'"{self.text}"', 0
        return self.quoted()

    def joined(self, parts: Sequence[tuple[str, bool]]) -> list[str]:
        words: list[str] = [""]
        any_quoted = False
        for text, whole in parts:
            any_quoted |= whole
            if text == EMPTY:
                continue
            pieces = text.split(ARRAY)
            if not whole and UNKNOWN not in text:
                pieces = [one for piece in pieces for one in re.split(r"\s+", piece)]
            words[-1] += pieces[0]
            words += pieces[1:]
        empty = not any_quoted or (EMPTY in [one for one, _ in parts] and words == [""])
        return [one for one in words if one or not empty]


ARRAY, EMPTY = "\1", "\2"  # between the words of an array; of an array without words


def balanced(text: str, start: int, pair: str) -> str:
    """From `start` to the end of what opens there, with what stands before it."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == pair[0]) - (text[at] == pair[1])
        if depth == 0:
            return text[: at + 1]
    return text


__all__ = ["PYTHON", "SHELLS", "STARTERS", "TRAINERS", "WRAPPERS", "is_shell", "started"]
