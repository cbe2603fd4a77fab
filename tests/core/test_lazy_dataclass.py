"""memfit's `dataclass` behaves as the standard one, and compiles nothing on import."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from dataclasses import field
from functools import cached_property
from typing import Any, ClassVar

import pytest

from memfit.lazy_dataclass import dataclass as lazy


def make(decorator: Any) -> Any:
    @decorator(frozen=True, kw_only=True)
    class Point:
        x: int
        y: int = 2
        tags: list[str] = field(default_factory=list, compare=False)
        secret: str = field(default="s", repr=False, hash=False)

        @cached_property
        def total(self) -> int:
            return self.x + self.y

    return Point


@lazy(frozen=True, kw_only=True)
class Global:
    a: int
    b: tuple[int, ...] = ()


Standard, Lazy = make(dataclasses.dataclass), make(lazy)


@pytest.mark.parametrize("kind", [Standard, Lazy], ids=["standard", "lazy"])
def test_values_defaults_and_factories(kind: Any) -> None:
    one, other = kind(x=1), kind(x=1, tags=["t"])
    assert (one.x, one.y, one.tags, one.secret) == (1, 2, [], "s")
    assert one.tags is not kind(x=1).tags
    assert one == other
    assert one != kind(x=1, secret="other")
    assert hash(one) == hash(other) == hash(kind(x=1, secret="other"))
    assert one != 1
    assert one.total == 3


@pytest.mark.parametrize("kind", [Standard, Lazy], ids=["standard", "lazy"])
def test_it_is_frozen_and_takes_keywords_alone(kind: Any) -> None:
    one = kind(x=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.x = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.x
    for wrong in ((1,), ()):
        with pytest.raises(TypeError):
            kind(*wrong)
    with pytest.raises(TypeError):
        kind(x=1, z=2)


def test_the_text_is_the_standard_one() -> None:
    assert repr(Lazy(x=1)) == repr(Standard(x=1))


def test_replace_fields_copies_and_pickles() -> None:
    one = Lazy(x=1)
    assert dataclasses.replace(one, x=5) == Lazy(x=5)
    assert [name.name for name in dataclasses.fields(Lazy)] == ["x", "y", "tags", "secret"]
    assert dataclasses.asdict(one) == dataclasses.asdict(Standard(x=1))
    assert copy.deepcopy(one) == one
    assert pickle.loads(pickle.dumps(Global(a=1))) == Global(a=1)  # noqa: S301 - our own


def test_inheritance_and_post_init() -> None:
    seen = []

    @lazy(frozen=True, kw_only=True)
    class Base:
        a: int

        def __post_init__(self) -> None:
            seen.append(self.a)

    @lazy(frozen=True, kw_only=True)
    class Child(Base):
        b: int = 3

    assert Child(a=1) == Child(a=1, b=3)
    assert Child(a=1) != Base(a=1)
    assert seen == [1, 1, 1, 1]
    assert repr(Child(a=1)).endswith("Child(a=1, b=3)")


def test_own_methods_are_kept_and_other_kinds_are_standard() -> None:
    @lazy(frozen=True, kw_only=True)
    class Named:
        a: int

        def __hash__(self) -> int:
            return 7

        def __repr__(self) -> str:
            return "mine"

    assert (hash(Named(a=1)), repr(Named(a=1))) == (7, "mine")

    @lazy(frozen=True, slots=True, kw_only=True)
    class Frozen:
        a: int

    assert "_of_self" not in Frozen.__init__.__code__.co_varnames
    with pytest.raises(dataclasses.FrozenInstanceError):
        Frozen(a=1).b = 2

    @lazy(slots=True, kw_only=True)
    class Slotted:
        a: int

    assert not hasattr(Slotted(a=1), "__dict__")


def inheriting(decorator: Any) -> tuple[Any, Any]:
    @decorator(frozen=True, kw_only=True)
    class Base:
        kind: ClassVar[str] = "base"
        a: int
        b: tuple[int, ...] = (1,)

    @decorator(frozen=True, kw_only=True)
    class Derived(Base):
        a: int = 3
        c: dict[str, int] = field(default_factory=dict, metadata={"help": "h"})

    return Base, Derived


def test_fields_are_those_of_the_standard_decorator() -> None:
    for standard, made in zip(
        (*inheriting(dataclasses.dataclass), Standard), (*inheriting(lazy), Lazy), strict=True
    ):
        assert list(map(repr, dataclasses.fields(standard))) == list(
            map(repr, dataclasses.fields(made))
        )
        assert standard.__match_args__ == made.__match_args__
    assert dataclasses.replace(inheriting(lazy)[1](), a=4).a == 4
    assert inheriting(lazy)[1].kind == "base"


def test_a_class_has_its_defaults_before_the_first_instance() -> None:
    base, derived = inheriting(lazy)
    assert (base.kind, base.b, derived.a) == ("base", (1,), 3)
    assert not hasattr(derived, "c")
    made = make(lazy)
    assert (made.y, made.secret) == (2, "s")
    assert not hasattr(made, "tags")
    assert made(x=1).tags == []

    @lazy(frozen=True, kw_only=True)
    class Mixed:
        kind: ClassVar[str] = "mixed"
        a: int = field(default=3, metadata={"help": "h"})
        b: list[int] = field(default_factory=list)

    assert Mixed.a == 3
    assert dataclasses.fields(Mixed)[0].metadata == {"help": "h"}
    assert (Mixed().a, Mixed().b, Mixed.a) == (3, [], 3)
    code = "from memfit.job import Job; assert Job.method == Job().method, Job.method"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_mutable_default_is_refused() -> None:
    @lazy(frozen=True, kw_only=True)
    class Shared:
        a: list[int] = []

    with pytest.raises(ValueError, match="mutable default"):
        Shared()


def test_fields_may_have_any_name() -> None:
    @lazy(frozen=True, kw_only=True)
    class Odd:
        values: int
        unset: list[int] = field(default_factory=list)
        default_values: str = "d"

    one = Odd(values=3)
    assert (one.values, one.unset, one.default_values) == (3, [], "d")


def test_nothing_is_compiled_before_the_first_call() -> None:
    @lazy(frozen=True, kw_only=True)
    class Unused:
        a: int

    assert "_of_self" not in Unused.__init__.__code__.co_varnames
    Unused(a=1)
    assert "_of_self" in Unused.__init__.__code__.co_varnames
