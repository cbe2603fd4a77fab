"""Conditions that only a GPU could answer, where a program stops unless they hold: an assertion,
and an `if` that raises."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from types import FrameType

Span = tuple[int, int, int, int]  # line and column where code begins, and where it ends
Stop = tuple[ast.stmt, ast.expr, bool]  # a statement, its test, and the outcome that goes on


def passing(frame: FrameType) -> bool | None:
    """The answer with which the program goes on; None where either answer does."""
    places = positions(frame)
    if not places:
        return None
    for statement, test, goal in stopping(frame.f_code.co_filename):
        # Python 3.11 gives a jump the place of its statement: the value comes from just before it
        within = places if places[0][:2] == span(statement)[:2] else places[:1]
        place = next((one for one in within if covers(test, one)), None)
        if place is not None:
            return answer(test, goal, place)
    return None


def positions(frame: FrameType) -> list[Span]:
    """Where the running instruction comes from, then those before it; Python 3.10 does not say."""
    code = frame.f_code
    if not hasattr(code, "co_positions"):
        return []
    found = list(itertools.islice(code.co_positions(), frame.f_lasti // 2 + 1))
    return [
        (first, start, last, end)
        for first, last, start, end in reversed(found)
        if not (first is None or last is None or start is None or end is None)
    ]


@functools.cache
def stopping(name: str) -> tuple[Stop, ...]:
    """The tests of a file that stop the program."""
    try:
        tree = ast.parse("".join(linecache.getlines(name)))
    except (SyntaxError, ValueError):
        return ()
    found: list[Stop] = []
    for node in ast.walk(tree):
        match node:
            case ast.Assert(test=test):
                found.append((node, test, True))
            case ast.If(test=test, body=[*_, ast.Raise()]):
                found.append((node, test, False))
    return tuple(found)


def answer(node: ast.expr, goal: bool, place: Span) -> bool | None:
    """What the expression at this place must be for the whole to come out as wanted."""
    while True:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node, goal = node.operand, not goal
            continue
        parts = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        inner = next((one for one in parts if covers(one, place)), None)
        if inner is None:
            return goal
        if isinstance(node, ast.Compare):  # with a value that is not looked at here
            return None
        node = inner


def span(node: ast.expr | ast.stmt) -> Span:
    last, end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    return node.lineno, node.col_offset, last, end


def covers(node: ast.expr, place: Span) -> bool:
    around = span(node)
    return around[:2] <= place[:2] and place[2:] <= around[2:]


__all__ = ["passing"]
