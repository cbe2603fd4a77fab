"""What a script's own text says of a column's values: the names of classes that it compares them
with, or looks up in a dict."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from typing import Any

from memfit.trace import lines

UNNAMED = ("class 0", "class 1")  # where the dict is made from the column itself
NUMBERED = re.compile(r"(?:2|_to_)(?:id|ids|idx|index|int|num)$", re.IGNORECASE)
OTHER = "another class"
SAME = {"lower", "upper", "strip", "title", "item", "tolist", "unique", "astype"}
REDUCED = {"max", "min", "mean", "median", "std", "sum"}
TOKENIZING = re.compile(r"^(?:\w*tokenizer|encode|encode_plus|batch_encode_plus)$")
LOOKING_UP = {"map", "replace"}
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


def values_of(column: str) -> tuple[Any, ...]:
    """The values that a script expects in this column, or none if it does not say."""
    texts = [one for one in lines.texts() if column in one]
    return joined(value for one in texts for value in Reader(one, column).values())


def is_text(column: str) -> bool:
    """Whether a script joins this column's values to a text, splits them as one, or hands them to
    a tokenizer."""
    return any(Reader(one, column).text() for one in lines.texts() if column in one)


def is_number(column: str) -> bool:
    """Whether a script takes the largest, the mean … of this column's values."""
    return any(Reader(one, column).number() for one in lines.texts() if column in one)


def beside(column: str) -> tuple[str, ...]:
    """Columns whose values a script joins this column's to: `row["prompt"] + row["chosen"]`."""
    return tuple(other for one in lines.texts() if column in one for other in partners(one, column))


def partners(text: str, column: str) -> Iterator[str]:
    for node in ast.walk(parsed(text)):
        match node:
            case ast.BinOp(
                left=ast.Subscript(slice=ast.Constant(value=str(left))),
                op=ast.Add(),
                right=ast.Subscript(slice=ast.Constant(value=str(right))),
            ) if column in (left, right):
                yield right if column == left else left


def joined(values: Iterator[Any]) -> tuple[Any, ...]:
    """Each once, and never one alone, since a script tells it from others. Texts win over numbers,
    and values over the names of classes that have none."""
    found = list(values)
    known = [one for one in found if one is not UNNAMED]
    names = tuple(dict.fromkeys([one for one in known if isinstance(one, str)] or known))
    return (*names, OTHER) if len(names) == 1 else names or (UNNAMED if found else ())


@functools.cache
def parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


class Reader:
    """One file, read for one column."""

    def __init__(self, text: str, column: str) -> None:
        self.tree, self.column = parsed(text), column

    def values(self) -> Iterator[Any]:
        scopes = [one for one in ast.walk(self.tree) if isinstance(one, Scope)]
        for scope in scopes:
            names = self.aliases(scope)
            for node in own(scope):
                yield from self.said(node, names)

    def text(self) -> bool:
        return self.joined() or self.tokenized()

    def tokenized(self) -> bool:
        """Also under a name that holds them: `targets = batch["target"]; tokenizer(targets)`."""
        for scope in (one for one in ast.walk(self.tree) if isinstance(one, Scope)):
            names = self.aliases(scope)
            for node in own(scope):
                match node:
                    case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if (
                        TOKENIZING.search(name)
                    ):
                        given = [*node.args[:2], *(one.value for one in node.keywords)]
                        if any(self.about(one, names) for one in given):
                            return True
        return False

    def joined(self) -> bool:
        for node in ast.walk(self.tree):
            match node:
                case ast.BinOp(left=left, op=ast.Add(), right=right):
                    if (self.about(left, frozenset()) and is_literal(right)) or (
                        self.about(right, frozenset()) and is_literal(left)
                    ):
                        return True
                case ast.Call(func=ast.Attribute(value=value, attr="split" | "strip" | "lower")):
                    if self.about(value, frozenset()):
                        return True
        return False

    def number(self) -> bool:
        for node in ast.walk(self.tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Subscript() as value, attr=name)):
                    if name in REDUCED and self.about(value, frozenset()):
                        return True
        return False

    def aliases(self, scope: Scope) -> frozenset[str]:
        """Names that hold a value of the column within one function."""
        found: set[str] = set()
        for _ in range(2):  # a name may come from another one
            for node in own(scope):
                match node:
                    case ast.Assign(targets=[ast.Name(id=name)], value=value):
                        pass
                    case ast.For(target=ast.Name(id=name), iter=value):
                        pass
                    case ast.comprehension(target=ast.Name(id=name), iter=value):
                        pass
                    case ast.Call(
                        func=ast.Attribute(value=value, attr="map" | "apply"),
                        args=[ast.Lambda(args=ast.arguments(args=[ast.arg(arg=name)]))],
                    ):
                        pass
                    case _:
                        continue
                if self.about(value, frozenset(found)):
                    found.add(name)
        return frozenset(found)

    def about(self, node: ast.expr, names: frozenset[str]) -> bool:
        """Whether an expression is a value of the column."""
        match node:
            case ast.Name(id=name):
                return name in names or name in (self.column, f"{self.column}s")
            case ast.Subscript(slice=ast.Constant(value=value)):
                return bool(value == self.column)
            case ast.Attribute(attr=name):
                return name == self.column
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=value), *_]):
                return bool(value == self.column)
            case ast.Call(func=ast.Attribute(value=inner, attr=name)) if name in SAME:
                return self.about(inner, names)
            case ast.Call(
                func=ast.Name(id="str" | "int" | "set" | "sorted" | "list"), args=[inner]
            ):
                return self.about(inner, names)
        return False

    def said(self, node: ast.AST, names: frozenset[str]) -> Iterator[Any]:
        match node:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.In()], comparators=[right]):
                for one, other in ((left, right), (right, left)):
                    if self.about(one, names):
                        yield from (value for value in constants(other) if type(value) is str)
            case ast.Call(func=ast.Name(id="isinstance"), args=[one, ast.Name(id="str")]) if (
                self.about(one, names)
            ):
                yield UNNAMED
            case ast.Subscript(value=table, slice=key) if self.about(key, names):
                yield from self.keys(table)
            case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[key, *_]) if (
                self.about(key, names)
            ):
                yield from self.keys(table)
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=[table, *_]) if (
                name in LOOKING_UP and self.about(value, names)
            ):
                yield from self.keys(table)

    def keys(self, table: ast.expr) -> Iterator[Any]:
        """Keys of a dict that is written out, or has a name."""
        name = table.attr if isinstance(table, ast.Attribute) else getattr(table, "id", "")
        made = [table] if isinstance(table, ast.Dict) else list(self.assigned(name))
        for one in made:
            if isinstance(one, ast.Dict):
                yield from (value for key in one.keys for value in constants(key))
        if not any(isinstance(one, ast.Dict) for one in made) and NUMBERED.search(name):
            yield UNNAMED

    def assigned(self, name: str) -> Iterator[ast.expr]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and name:
                called = (getattr(one, "attr", getattr(one, "id", "")) for one in node.targets)
                if name in called:
                    yield node.value


def own(scope: Scope) -> Iterator[ast.AST]:
    """Everything in a function but the functions in it."""
    rest: list[ast.AST] = list(scope.body)
    while rest:
        node = rest.pop()
        yield node
        if not isinstance(node, Scope):
            rest += ast.iter_child_nodes(node)


def is_literal(node: ast.expr) -> bool:
    """A text that is written out, or a sum with one."""
    match node:
        case ast.JoinedStr() | ast.Constant(value=str()):
            return True
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return is_literal(left) or is_literal(right)
    return False


def constants(node: ast.expr | None) -> Iterator[Any]:
    """A text or a number, or those of a list."""
    if isinstance(node, ast.Constant) and type(node.value) in (str, int) and node.value != "":
        yield node.value
    elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        for one in node.elts:
            yield from constants(one)


__all__ = ["UNNAMED", "Reader", "beside", "is_number", "is_text", "joined", "partners", "values_of"]
