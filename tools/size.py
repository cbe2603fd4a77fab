"""How big the house is: files, lines and code lines per folder, then what has outgrown the house
rules.

A code line is one that is neither blank, nor a comment, nor part of a docstring.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "tools", "bench")
LONGEST_FUNCTION, LONGEST_FILE, MOST_PARAMETERS = 60, 400, 8


@dataclass(frozen=True, kw_only=True)
class Source:
    """One Python file, parsed once."""

    path: Path
    text: str
    tree: ast.Module

    @classmethod
    def read(cls, path: Path) -> Source:
        text = path.read_text(encoding="utf-8")
        return cls(path=path.relative_to(ROOT), text=text, tree=ast.parse(text))

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def code(self) -> int:
        silent: set[int] = set()
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                silent.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        numbered = enumerate(self.text.splitlines(), start=1)
        return sum(
            number not in silent and bool(line.strip()) and not line.lstrip().startswith("#")
            for number, line in numbered
        )

    def outgrown(self) -> Iterator[str]:
        if self.lines > LONGEST_FILE:
            yield f"{self.path}: {self.lines} lines"
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            parameters = (
                len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
            )
            if length > LONGEST_FUNCTION:
                yield f"{self.path}:{node.lineno} {node.name}: {length} lines"
            if parameters > MOST_PARAMETERS:
                yield f"{self.path}:{node.lineno} {node.name}: {parameters} parameters"


def folder(path: Path) -> str:
    """Modules next to memfit's packages count together; other files count with the folder they lie
    in."""
    parts = path.parts
    return "/".join(parts[: 3 if parts[0] == "src" and len(parts) > 3 else min(2, len(parts) - 1)])


def main() -> int:
    sources = [
        Source.read(path) for name in FOLDERS for path in sorted((ROOT / name).rglob("*.py"))
    ]
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for source in sources:
        for name in (folder(source.path), f"{source.path.parts[0]} in all"):
            for index, amount in enumerate((1, source.lines, source.code())):
                totals[name][index] += amount
    print(f"{'folder':<28}{'files':>7}{'lines':>8}{'code':>8}")
    for name, (files, lines, code) in sorted(totals.items()):
        print(f"{name:<28}{files:>7}{lines:>8}{code:>8}")
    outgrown = [line for source in sources for line in source.outgrown()]
    print(
        f"\nlonger than {LONGEST_FILE} lines a file, {LONGEST_FUNCTION} a function, or "
        f"{MOST_PARAMETERS} parameters: {len(outgrown) or 'none'}"
    )
    print(*outgrown, sep="\n", end="\n" if outgrown else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
