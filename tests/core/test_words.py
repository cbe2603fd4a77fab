"""What users read: no phrase that the glossary bans, in messages, help pages and documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "memfit"
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
BANNED = GLOSSARY.partition("## Banned phrases")[2].split("```")[1].split("\n")[1:-1]
# The log keeps its entries as they were written; what a publisher says stays in their words.
OLD = {ROOT / "docs" / "log.md", ROOT / "docs" / "glossary.md"}
PAGES = [
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path not in OLD),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")),
]
PATTERN = re.compile("|".join(rf"\b{re.escape(phrase)}\b" for phrase in BANNED), re.IGNORECASE)


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Every text of a module that may reach a user: all strings but docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    for node in ast.walk(tree):
        if id(node) in docstrings | inside:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield node.lineno, "".join(map(str, parts))


def test_the_glossary_has_phrases() -> None:
    assert len(BANNED) > 20
    assert all(phrase == phrase.strip().lower() for phrase in BANNED)


def test_no_message_has_a_banned_phrase() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:90]}"
        for path in sorted(SRC.rglob("*.py"))
        for line, text in strings(path)
        if PATTERN.search(text)
    ]
    assert found == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_page_has_a_banned_phrase(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [
        f"{number}: {line[:90]}" for number, line in enumerate(lines, 1) if PATTERN.search(line)
    ]
    assert found == []
