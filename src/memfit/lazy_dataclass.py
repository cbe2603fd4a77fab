"""`dataclass`, with methods that are compiled when they are first called.

The standard decorator compiles up to six methods of each class on import, which was half of the
time that `memfit estimate` took to start. For frozen, keyword-only classes this one reads the
fields on first use, and compiles `__init__`, `__eq__` and `__hash__` at their first call; type
checkers see the standard one.
"""

from __future__ import annotations

import dataclasses
from _thread import RLock
from collections.abc import Callable, Iterator
from functools import cache
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

FIELDS = "__dataclass_fields__"  # where `dataclasses` keeps and seeks them

NO_FIELD = ("ClassVar", "InitVar", "KW_ONLY")  # in the annotation of what is none
TAKEN = ("repr", "eq", "slots")  # slots would make the class twice: there are none
_LOOKING = RLock()

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, **options):
        """As `dataclasses.dataclass`; other than frozen keyword-only classes are left to it."""
        if cls is None:
            return lambda given: dataclass(given, **options)
        rest = {name: value for name, value in options.items() if name not in TAKEN}
        if rest != {"frozen": True, "kw_only": True} or not _bases_are_lazy(cls):
            return dataclasses.dataclass(cls, **options)
        return _made(cls, repr_too=options.get("repr", True), eq_too=options.get("eq", True))


def _bases_are_lazy(cls: type) -> bool:
    """A standard frozen dataclass among the bases wants standard ones above it."""
    known = [vars(base) for base in cls.__mro__[1:]]
    return all("_made_lazily" in own for own in known if FIELDS in own)


class _Fields:
    """Stands in the place of a class's fields, and finds them at the first look."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        with _LOOKING:
            for cls in owner.__mro__:
                if vars(cls).get(FIELDS) is self:
                    _find_fields(cls)
        return getattr(owner, FIELDS)


def _made(cls: Any, *, repr_too: bool, eq_too: bool) -> Any:
    own = dict(vars(cls))
    if not own.get("__doc__"):
        cls.__doc__ = cls.__name__  # else the standard one writes a signature, which takes time
    setattr(cls, FIELDS, _Fields())
    cls._made_lazily = True
    _show_defaults(cls, own)
    cls.__setattr__, cls.__delattr__ = _refuse_to_set, _refuse_to_delete
    if "__init__" not in own:
        _compile_at_first_call(cls, "__init__", _init_source)
    if repr_too and "__repr__" not in own:
        cls.__repr__ = _repr
    if eq_too and "__eq__" not in own:
        _compile_at_first_call(cls, "__eq__", _eq_source)
    if eq_too and own.get("__hash__") is None:
        _compile_at_first_call(cls, "__hash__", _hash_source)
    return cls


def _show_defaults(cls: Any, own: dict[str, Any]) -> None:
    """Puts defaults in the place of `field(…)`, which is kept until the fields are looked for."""
    given = {name: one for name, one in own.items() if type(one) is dataclasses.Field}
    cls._fields_given = given
    for name, one in given.items():
        if one.default is dataclasses.MISSING:
            delattr(cls, name)
        else:
            setattr(cls, name, one.default)


@cache
def _parameters() -> Any:
    class Sample:
        """Has no fields."""

    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=True)(Sample)
    return made.__dataclass_params__


def _find_fields(cls: Any) -> None:
    """What the standard decorator does to a class but for methods, in an eighth of the time where
    every annotation is a field."""
    own, written = cls.__annotations__, vars(cls)["_fields_given"]
    if not all(
        type(one) is str and not any(map(one.__contains__, NO_FIELD)) for one in own.values()
    ):
        for name, one in written.items():
            setattr(cls, name, one)
        dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
        return
    found: dict[str, Any] = {}
    for base in cls.__mro__[:0:-1]:
        found.update(getattr(base, FIELDS, {}))
    for name, annotation in own.items():
        found[name] = _field(cls, name, annotation, written.get(name))
    cls.__dataclass_params__ = _parameters()
    setattr(cls, "__match_args__", ())  # noqa: B010 - mypy wants them to be written in the class
    setattr(cls, FIELDS, found)


def _field(cls: Any, name: str, annotation: str, written: Any) -> Any:
    """`written`: its `field(…)`, where it has one."""
    given: Any = getattr(cls, name, dataclasses.MISSING)
    one: Any = dataclasses.field(default=given) if written is None else written
    if type(one.default).__hash__ is None:
        raise ValueError(f"mutable default {type(one.default)} of {name}: use a factory")
    one.name, one.type, one.kw_only = name, annotation, True
    one._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
    return one


def _refuse_to_set(self: Any, name: str, value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (one.name for one in dataclasses.fields(self) if one.repr)
    listed = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
    return f"{type(self).__qualname__}({listed})"


def _compile_at_first_call(
    cls: Any, name: str, source: Callable[[Any, dict[str, Any]], Iterator[str]]
) -> None:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        space: dict[str, Any] = {}
        lines = "\n ".join(source(cls, space))
        exec(lines, space)  # noqa: S102 - as `dataclasses` does, from field names alone
        compiled = space[name]
        compiled.__qualname__ = f"{cls.__qualname__}.{name}"
        setattr(cls, name, compiled)
        return compiled(self, *args, **named)

    method.__qualname__ = f"{cls.__qualname__}.{name}"
    setattr(cls, name, method)


def _init_source(cls: Any, space: dict[str, Any]) -> Iterator[str]:
    """Writes into `__dict__`, past the `__setattr__` that refuses. Names of its own begin with an
    underscore and `of`, which no field does."""
    wanted, body = [], []
    for one in dataclasses.fields(cls):
        name, factory = one.name, one.default_factory
        if factory is not dataclasses.MISSING:
            space[f"_of_make_{name}"], space["_of_unset"] = factory, dataclasses.MISSING
            made = f"_of_make_{name}()"
            if one.init:
                made += f" if {name} is _of_unset else {name}"
            wanted += [f"{name}=_of_unset"] if one.init else []
            body.append(f"_of_self[{name!r}] = {made}")
        elif one.init:
            if one.default is not dataclasses.MISSING:
                space[f"_of_default_{name}"] = one.default
            given = "" if one.default is dataclasses.MISSING else f"=_of_default_{name}"
            wanted.append(f"{name}{given}")
            body.append(f"_of_self[{name!r}] = {name}")
    yield f"def __init__(self, {'*, ' if wanted else ''}{', '.join(wanted)}):"
    yield "_of_self = self.__dict__"
    yield from body
    if hasattr(cls, "__post_init__"):
        yield "self.__post_init__()"


def _compared(cls: Any, owner: str, *, hashed: bool = False) -> str:
    names = [
        one.name
        for one in dataclasses.fields(cls)
        if (one.compare if not hashed or one.hash is None else one.hash)
    ]
    return "(" + "".join(f"{owner}.{name}, " for name in names) + ")"


def _eq_source(cls: Any, space: dict[str, Any]) -> Iterator[str]:
    yield "def __eq__(self, other):"
    yield "if other.__class__ is self.__class__:"
    yield f" return {_compared(cls, 'self')} == {_compared(cls, 'other')}"
    yield "return NotImplemented"


def _hash_source(cls: Any, space: dict[str, Any]) -> Iterator[str]:
    yield "def __hash__(self):"
    yield f"return hash({_compared(cls, 'self', hashed=True)})"


__all__ = ["dataclass"]
