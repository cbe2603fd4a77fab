"""The ledger of hidden memory (docs/concepts/hidden.md) against the code: what it names exists, and every kernel's row is in it."""

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
PLACE = re.compile(r"`([\w/.]+): (\w+)`")


@cache
def defined(path: str) -> frozenset[str]:
    """Functions, methods, classes and constants of a file."""
    tree = ast.parse((ROOT / "src" / "memfit" / path).read_text(encoding="utf-8"))
    found = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    targets = [
        target
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in getattr(node, "targets", [getattr(node, "target", None)])
    ]
    names = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
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
        assert name in (KERNELS if file == "kernels" else defined(file)), f"{what}: {file} has no {name}"


def test_every_kernel_is_told() -> None:
    told = {name for file, name in PLACE.findall(PAGE) if file == "kernels"}
    assert set(KERNELS) - {"name"} == told - {"name"}
    assert len(ROWS) > 120
