"""Docs that cannot drift: runs the commands that the docs show and compares, or replaces, what the
docs say they print.

A block is a marker on a line of its own and a fenced code block right below it:

    <!-- run: memfit gpus -->              the command must exit with 0
    <!-- run exit=1 head=12: memfit … -->  it must exit with 1; only the first 12 lines are shown
    <!-- run tail=2: memfit … -->          only the last 2 lines are shown

Commands run offline, 80 columns wide, without colour and with empty caches, so that every machine
prints the same. Only `memfit …` and `python …` are run, in the interpreter that runs this script.

    python tools/transcripts.py [--check] [FILE ...]
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 80
TIMEOUT = 300.0
MARKER = re.compile(r"^<!-- run(?P<options>(?: \w+=\d+)*): (?P<command>.+?) -->$", re.MULTILINE)
LOOKS_LIKE_MARKER = re.compile(r"^<!--\s*run\b.*$", re.MULTILINE)
FENCE = re.compile(r"\n(?P<fence>`{3,})\w*\n(?P<body>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)
# Signs of life, which only a slow machine shows.
PROGRESS = re.compile(r"tracing: |\[[█░]|.+, \d+ of \d+, \d+ s$")
START_MEMFIT = "import sys; sys.argv[0] = 'memfit'; from memfit.cli import main; sys.exit(main())"


class Broken(Exception):
    """A block that cannot be run, or whose command did not end as the marker says."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One marked command, and where the text below its `$ command` line stands."""

    command: str
    exit: int
    head: int
    tail: int
    start: int
    end: int

    def output(self) -> str:
        words = shlex.split(self.command)
        done = subprocess.run(
            arguments(words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(),
            cwd=ROOT,
            timeout=TIMEOUT,
            check=False,
        )
        text = done.stdout.decode()
        if done.returncode != self.exit:
            raise Broken(f"`{self.command}` exits with {done.returncode}, not {self.exit}\n{text}")
        lines = [line.rstrip() for line in text.rstrip().splitlines() if not PROGRESS.match(line)]
        if self.head and len(lines) > self.head:
            lines = [*lines[: self.head], "…"]
        if self.tail and len(lines) > self.tail:
            lines = ["…", *lines[-self.tail :]]
        return "".join(f"{line}\n" for line in [f"$ {self.command}", *lines])


def arguments(words: list[str]) -> list[str]:
    match words:
        case ["memfit", *rest]:
            return [sys.executable, "-c", START_MEMFIT, *rest]
        case ["python", *rest]:
            return [sys.executable, *rest]
        case _:
            raise Broken(f"`{shlex.join(words)}` is neither `memfit …` nor `python …`")


def environment() -> Mapping[str, str]:
    """Offline, plain and without anything that the user's own caches or settings could add."""
    passed = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("MEMFIT_", "HF_", "FORCE_", "CLICOLOR", "PYTHON"))
    }
    plain = {
        "COLUMNS": str(COLUMNS),
        "LINES": "60",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
    }
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(Path(tempfile.gettempdir()) / "memfit-transcripts-empty"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return (
        passed
        | plain
        | offline
        | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    )


def blocks(text: str) -> Iterator[Block]:
    """The marked blocks of a page, in order; a marker that nothing can be made of is an error, not
    a comment."""
    markers = {match.start(): match for match in MARKER.finditer(text)}
    for line in LOOKS_LIKE_MARKER.finditer(text):
        marker = markers.get(line.start())
        if marker is None:
            raise Broken(
                f"`{line[0]}` is no marker; write it like `<!-- run exit=1 head=12: memfit … -->`"
            )
        options = dict(option.split("=") for option in marker["options"].split())
        unknown = set(options) - {"exit", "head", "tail"}
        fence = FENCE.match(text, marker.end())
        if unknown or fence is None:
            raise Broken(
                f"`{line[0]}` has "
                + (
                    f"unknown options: {', '.join(sorted(unknown))}"
                    if unknown
                    else "no code block below it"
                )
            )
        yield Block(
            command=marker["command"],
            exit=int(options.get("exit", 0)),
            head=int(options.get("head", 0)),
            tail=int(options.get("tail", 0)),
            start=fence.start("body"),
            end=fence.end("body"),
        )


def refresh(text: str) -> str:
    """The page with every marked block as its command prints it now."""
    for block in reversed(list(blocks(text))):
        text = text[: block.start] + block.output() + text[block.end :]
    return text


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def main() -> int:
    parser = argparse.ArgumentParser(description="refresh or check the transcripts in the docs")
    parser.add_argument(
        "--check",
        action="store_true",
        help="change nothing; exit with 1 when a transcript has drifted",
    )
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        help="pages (default: README.md, docs/ and the other pages at the top)",
    )
    options = parser.parse_args()
    status = 0
    for path in options.files or pages():
        text = path.read_text(encoding="utf-8")
        try:
            fresh = refresh(text)
        except (Broken, subprocess.TimeoutExpired) as error:
            print(f"{path}: {error}", file=sys.stderr)
            status = 2
            continue
        if fresh != text and options.check:
            print(
                f"{path}: a transcript has drifted; run `make docs` and look at the difference",
                file=sys.stderr,
            )
            status = max(status, 1)
        elif fresh != text:
            path.write_text(fresh, encoding="utf-8")
            print(f"{path}: refreshed", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
