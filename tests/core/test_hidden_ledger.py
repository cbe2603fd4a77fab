"""The ledger of hidden memory (docs/concepts/hidden.md) against the code: what it names exists, and
every kernel's row is in it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from memfit.kernels import KERNELS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "concepts" / "hidden.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and "| where |" not in line
]
FACTS = (ROOT / "docs" / "concepts" / "hidden_rows.md").read_text(encoding="utf-8")
NAMED = (Path(__file__).parent / "hidden_facts.txt").read_text(encoding="utf-8")
PLACE = re.compile(r"`([\w/.]+): (\w+)`")


@cache
def defined(path: str) -> frozenset[str]:
    """Functions, methods, classes and constants of a file."""
    tree = ast.parse((ROOT / "src" / "memfit" / path).read_text(encoding="utf-8"))
    found = {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    targets = [
        target
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in getattr(node, "targets", [getattr(node, "target", None)])
    ]
    names = [
        one
        for target in targets
        for one in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]
    return frozenset(found | {one.id for one in names if isinstance(one, ast.Name)})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_leads_somewhere(row: list[str]) -> None:
    what, _, where = row
    places = PLACE.findall(where)
    if where.startswith("not: "):
        assert len(where) > len("not: why"), what
        return
    assert places, what
    for file, name in places:
        assert name in (KERNELS if file == "kernels" else defined(file)), (
            f"{what}: {file} has no {name}"
        )


def test_every_kernel_is_told() -> None:
    told = {name for file, name in PLACE.findall(PAGE) if file == "kernels"}
    assert set(KERNELS) - {"name"} == told - {"name"}
    assert len(ROWS) > 120


def told(page: str) -> list[tuple[str, str, str]]:
    """Section, name and place of each fact on the page."""
    found, section = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| ") and line != "| fact | where |":
            name, _, where = line.strip("| ").partition(" | ")
            found.append((section, name, where))
    return found


def named() -> list[tuple[str, str]]:
    found, section = [], ""
    for line in NAMED.splitlines():
        if line.startswith("# "):
            section = line.removeprefix("# ")
        elif line:
            found.append((section, line))
    return found


def test_every_fact_is_told_once() -> None:
    assert [(section, name) for section, name, _ in told(FACTS)] == named()
    assert len(set(named())) == len(named()) == 260


def test_a_fact_leads_to_the_ledger_or_says_why_not() -> None:
    rows, wrong = {row[0] for row in ROWS}, []
    for section, name, where in told(FACTS):
        places = PLACE.findall(where)
        if where.startswith("not: "):
            right = len(where) > len("not: why")
        elif places:
            right = all(
                what in (KERNELS if file == "kernels" else defined(file)) for file, what in places
            )
        else:
            right = where in rows
        if not right:
            wrong.append(f"{section}: {name}: {where}")
    assert not wrong
