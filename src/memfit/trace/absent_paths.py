"""A bare `assert os.path.exists(path)` says nothing: which path it is about."""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
from collections.abc import Iterator
from types import FrameType
from typing import Any

from memfit.trace import lines

ASKING = {"exists", "isfile", "isdir", "is_file", "is_dir"}
# What a path is put together of; nothing else of a script is run again.
PARTS = (
    ast.Name,
    ast.Attribute,
    ast.Constant,
    ast.JoinedStr,
    ast.FormattedValue,
    ast.BinOp,
    ast.Subscript,
    ast.Load,
    ast.Add,
    ast.Div,
    ast.Mod,
    ast.Tuple,
)
JOINING = {"join", "Path", "str", "expanduser", "abspath"}


def asserted(bad: BaseException) -> str:
    """The path that the failed assertion of a script asked for; empty where it is about none."""
    at = bad.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None or not isinstance(bad, AssertionError) or str(bad):
        return ""
    name = at.tb_frame.f_code.co_filename
    if not lines.is_users(name):
        return ""
    for asked in questions("".join(linecache.getlines(name)), at.tb_lineno):
        path = value(asked, at.tb_frame)
        if isinstance(path, (str, os.PathLike)) and not os.path.exists(path):
            return os.fspath(path)
    return ""


def questions(text: str, number: int) -> Iterator[ast.expr]:
    """The expressions of paths in the assertion on a line."""
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Assert):
                continue
            if not node.lineno <= number <= (node.end_lineno or 0):
                continue
            for one in ast.walk(node.test):
                match one:
                    case ast.Call(func=ast.Attribute(value=inner, attr=attr), args=args):
                        if attr in ASKING:
                            yield args[0] if args else inner


def value(node: ast.expr, frame: FrameType) -> Any:
    for one in ast.walk(node):
        if isinstance(one, ast.Call):
            called = getattr(one.func, "attr", getattr(one.func, "id", ""))
            if called not in JOINING:
                return None
        elif not isinstance(one, PARTS):
            return None
    with contextlib.suppress(Exception):
        return eval(  # noqa: S307  (a path of the script, put together as it did)
            compile(ast.Expression(node), "<path>", "eval"), frame.f_globals, frame.f_locals
        )
    return None


__all__ = ["asserted"]
