"""The twenty first questions: each command of docs/first_questions.md says its answer in the first
three lines, and its figure is the one that others measured or that arithmetic gives."""

import gzip
import json
import re
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from memfit.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "first_questions.md"
ROW = re.compile(
    r"^\| \d+ \| (?P<question>.+?) \| `(?P<command>.+?)` \| `(?P<answer>.+?)` \| "
    r"(?P<expected>.+?) \| (?P<source>.+?) \|$",
    re.M,
)
ROWS = [tuple(one.groups()) for one in ROW.finditer(PAGE.read_text(encoding="utf-8"))]
FIGURE = re.compile(r"(?P<name>.+) = (?P<value>[\d.]+) GiB")
CLOSE = 0.05


def test_there_are_twenty_with_figures_and_sources() -> None:
    assert len(ROWS) == 20
    assert len({command for _, command, *_ in ROWS}) == 20
    assert sum(bool(FIGURE.fullmatch(expected)) for *_, expected, _ in ROWS) >= 10


def test_every_published_figure_is_the_one_of_its_row() -> None:
    """The bundled rows are copies of what publishers wrote: ids and figures agree with the page."""
    packed = (files("memfit.truth") / "data" / "published.jsonl.gz").read_bytes()
    known = {row["id"]: row for row in map(json.loads, gzip.decompress(packed).splitlines())}
    cited = [(re.findall(r"id ([a-z_]+-\d+)", source), source) for *_, source in ROWS]
    assert sum(len(ids) for ids, _ in cited) >= 8
    for ids, source in cited:
        for one in ids:
            value = known[one]["value_gib"]
            assert f"{value:g}"[:4] in source or f"{value:.2f}" in source, (one, value)


@pytest.mark.parametrize(
    ("question", "command", "answer", "expected", "source"), ROWS, ids=[row[0] for row in ROWS]
)
def test_the_first_three_lines_answer(
    question: str,
    command: str,
    answer: str,
    expected: str,
    source: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program, *words = shlex.split(command)
    assert program == "memfit"
    code = main([*words, "--offline"] if "--engine" not in words else words)
    lines = capsys.readouterr().out.splitlines()[:3]
    assert any(answer in line for line in lines), lines
    figure = FIGURE.fullmatch(expected)
    if figure is None:
        assert (code, expected) in ((0, "fits"), (1, "does not fit"))
        return
    assert code in (0, 1)
    main([*words, "--json"])
    found = read(json.loads(capsys.readouterr().out), figure["name"]) / 2**30
    assert found == pytest.approx(float(figure["value"]), rel=CLOSE)


def read(answer: dict[str, Any], name: str) -> int:
    """A counter or a part of an estimate, or a buffer of an engine on its first GPU."""
    if "pools" in answer:
        pools = [one for one in answer["pools"] if one["where"] in ("gpu", "gpu0", "GPU 0")]
        return int(next(one["bytes"] for one in pools if one["name"] == name))
    memory = answer["memory"]
    return int(memory["parts"].get(name) or memory[name])
