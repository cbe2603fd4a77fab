"""The twenty first questions: each command of docs/first_questions.md says its answer in the first
three lines."""

import re
import shlex
from pathlib import Path

import pytest

from memfit.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "first_questions.md"
ROW = re.compile(
    r"^\| \d+ \| (?P<question>.+?) \| `(?P<command>.+?)` \| `(?P<answer>.+?)` \|", re.M
)
ROWS = [(one["question"], one["command"], one["answer"]) for one in ROW.finditer(PAGE.read_text())]


def test_there_are_twenty() -> None:
    assert len(ROWS) == 20
    assert len({command for _, command, _ in ROWS}) >= 18


@pytest.mark.parametrize(("question", "command", "answer"), ROWS, ids=[row[0] for row in ROWS])
def test_the_first_three_lines_answer(
    question: str, command: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = shlex.split(command)
    assert program == "memfit"
    assert main([*words, "--offline"] if "--engine" not in words else words) in (0, 1)
    lines = capsys.readouterr().out.splitlines()[:3]
    assert any(answer in line for line in lines), lines
