"""Explicit lifetimes: no byte of a scoped function depends on how it names what it computes."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from memfit.formats import BF16
from memfit.lower.lifetimes import Scope, Value, scoped
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.tape import Alloc, Free

SCRIPT = Path(__file__).parent / "rewriting.py"
NAMED = 40  # intermediates that a rewriting names at least


@cache
def digests(*seed: str) -> tuple[dict[str, str], int]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *seed], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, changed = json.loads(done.stdout)
    return found, changed


@pytest.mark.parametrize("seed", ["1", "2"])
def test_names_of_intermediates_change_no_byte(seed: str) -> None:
    (before, none), (after, changed) = digests(), digests(seed)
    assert none == 0
    assert changed >= NAMED
    assert after == before


def made(r: Recorder, x: Tensor) -> Tensor:
    return r.tensor(x.shape, BF16, "made")


def order(r: Recorder) -> list[str]:
    return [
        f"{'+' if isinstance(event, Alloc) else '-'}{event.id}"
        for event in r.events
        if isinstance(event, (Alloc, Free))
    ]


def test_a_value_lives_until_its_last_use_or_the_end() -> None:
    @scoped
    def run(own: Scope, r: Recorder, x: Value) -> Value:
        first = own(made, r, x)
        second = own(made, r, first.last)
        third = own(made, r, second)
        return own(made, r, third.last)

    r = Recorder()
    out = run(r, r.tensor((4,), BF16, "x"))
    assert order(r) == ["+0", "+1", "+2", "-1", "+3", "+4", "-3", "-0", "-2"]
    del out
    assert order(r)[-1] == "-4"


def test_no_value_is_used_after_its_last_use() -> None:
    @scoped
    def run(own: Scope, r: Recorder, x: Value) -> Value:
        first = own(made, r, x)
        second = own(made, r, first.last)
        return own(made, r, first if second.count else second)

    r = Recorder()
    with pytest.raises(ValueError, match="after its last use"):
        run(r, r.tensor((4,), BF16, "x"))


def test_what_a_python_variable_names_is_not_held_by_it() -> None:
    outside: list[Value] = []

    @scoped
    def run(own: Scope, r: Recorder, x: Value) -> Value:
        outside.append(own(made, r, x))
        return own(made, r, outside[0].last)

    r = Recorder()
    out = run(r, r.tensor((4,), BF16, "x"))
    assert order(r) == ["+0", "+1", "+2", "-1", "-0"]
    assert out.count == 4
