"""Explicit lifetimes: who keeps a tensor alive, and when it is freed.

Elsewhere in `lower` a tensor lives as long as a Python variable names it, as in torch. A function
that is `scoped` sees no tensor, only a `Value`, a name for one. Its `Scope` holds the tensor of
every value until the function returns, until `drop`, or, of a value passed as `x.last`, until the
operation that took it has run. So no byte depends on how the function names its intermediates.

    @scoped
    def gated(own: Scope, x: Value, …) -> Value:
        gate = own(linear, x, …)
        opened = own(activate, gate.last, …)  # the activation is the gate's last use
        return own(ops.mul, own.r, opened, …)  # what is left goes when the function returns
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, TypeAlias, overload

from memfit.formats import Format
from memfit.lower.tensors import Shape, Tensor

Op: TypeAlias = Callable[..., Any]


class Value:
    """A name for a tensor that a scope holds."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor

    @property
    def last(self) -> Last:
        """The value as the argument of the operation that uses it last."""
        return Last(self)

    @property
    def shape(self) -> Shape:
        return self.held().shape

    @property
    def format(self) -> Format:
        return self.held().format

    @property
    def count(self) -> int:
        return self.held().count

    @property
    def leaf(self) -> bool:
        """No operation made it that a backward would go through."""
        return self.held().node is None

    def held(self) -> Tensor:
        if self.tensor is None:
            raise ValueError("a value is used after its last use")
        return self.tensor


class Last:
    """A value that goes when the operation that it is passed to has run."""

    __slots__ = ("value",)

    def __init__(self, value: Value) -> None:
        self.value = value


class Scope:
    """The values of a function that runs."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: list[Value] = []

    def value(self, tensor: Tensor) -> Value:
        found = Value(tensor)
        self.values.append(found)
        return found

    def __call__(self, op: Op, *args: Any) -> Value:
        """What `op` returns of these arguments, held by this scope."""
        return self.value(called(op, args))

    def several(self, op: Op, *args: Any) -> list[Value]:
        """The same of an operation that returns several tensors."""
        return [self.value(one) for one in called(op, args)]

    def assign(self, value: Value, op: Op, *args: Any) -> None:
        """The name stands for what `op` returns; what it stood for goes."""
        value.tensor = called(op, args)

    def move(self, value: Value, other: Value) -> None:
        """The name stands for what `other` stood for; what it stood for goes."""
        value.tensor, other.tensor = other.held(), None

    def anew(self, names: Sequence[Value], others: Sequence[Value]) -> None:
        """The same of several names, one after the other."""
        for name, other in zip(names, others, strict=True):
            self.move(name, other)

    def last_first(self, *values: Value) -> None:
        """At the end these go in the opposite order, as the items of a list do."""
        places = sorted(self.values.index(one) for one in values)
        for place, one in zip(places, reversed(values), strict=True):
            self.values[place] = one

    def drop(self, *values: Value) -> None:
        """These values go, one after the other."""
        for value in values:
            value.tensor = None

    def empty(self) -> Value:
        """A name without a tensor so far: at the end values go in the order of their names."""
        found = Value(None)
        self.values.append(found)
        return found

    def lend(self, holder: list[Tensor], *values: Value) -> None:
        """`holder` holds the tensors, too."""
        holder.extend(value.held() for value in values)

    def close(self) -> None:
        self.drop(*self.values)

    def leaves(self, *values: Value | None) -> tuple[Tensor | None, ...]:
        """Parameters, which the model holds."""
        return tuple(None if value is None else value.held() for value in values)

    def result(self, value: Value | tuple[Value, ...]) -> Any:
        """The tensor of a value, or those of several; all others go."""
        found: Any = (
            tuple([one.held() for one in value]) if isinstance(value, tuple) else value.held()
        )
        self.close()
        return found


def taken(argument: Any) -> Any:
    """An argument as an operation gets it; nobody else holds what comes for the last time."""
    if type(argument) is Value:
        return argument.held()
    if type(argument) is not Last:
        return argument
    tensor, argument.value.tensor = argument.value.held(), None
    return tensor


def called(op: Op, args: tuple[Any, ...]) -> Any:
    """`op(*args)`; written out, so that no tuple holds the arguments while it runs."""
    match len(args):
        case 1:
            return op(taken(args[0]))
        case 2:
            return op(taken(args[0]), taken(args[1]))
        case 3:
            return op(taken(args[0]), taken(args[1]), taken(args[2]))
        case 4:
            return op(taken(args[0]), taken(args[1]), taken(args[2]), taken(args[3]))
        case 5:
            return op(
                taken(args[0]), taken(args[1]), taken(args[2]), taken(args[3]), taken(args[4])
            )
        case 6:
            return op(
                taken(args[0]),
                taken(args[1]),
                taken(args[2]),
                taken(args[3]),
                taken(args[4]),
                taken(args[5]),
            )
        case 7:
            return op(
                taken(args[0]),
                taken(args[1]),
                taken(args[2]),
                taken(args[3]),
                taken(args[4]),
                taken(args[5]),
                taken(args[6]),
            )
    raise TypeError(f"an operation of {len(args)} arguments")


def itself(x: Tensor) -> Tensor:
    """Another name for a value."""
    return x


@overload
def scoped(function: Callable[..., Value]) -> Callable[..., Tensor]: ...
@overload
def scoped(
    function: Callable[..., tuple[Value, Value]],
) -> Callable[..., tuple[Tensor, Tensor]]: ...
@overload
def scoped(
    function: Callable[..., tuple[Value, ...]],
) -> Callable[..., tuple[Tensor, ...]]: ...
def scoped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of tensors that runs this one of values in a scope of its own."""

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        own = Scope()
        values = named(own, args)
        del args
        try:
            return own.result(function(own, *values, **options))
        except Unwinding as stopped:
            stopped.scopes[sys._getframe()] = own
            raise

    return run


def named(own: Scope, args: Iterable[Any]) -> list[Any]:
    return [own.value(one) if isinstance(one, Tensor) else one for one in args]


class Unwinding(Exception):
    """Ends functions that run; each keeps its scope here, and `unwind` closes them."""

    def __init__(self) -> None:
        super().__init__()
        self.scopes: dict[FrameType, Scope] = {}

    def unwind(self) -> None:
        """All that ran ends, from the inside out."""
        frames: list[FrameType] = []
        trace: TracebackType | None = self.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame)
            trace = trace.tb_next
        for frame in reversed(frames[1:]):
            frame.clear()
            if frame in self.scopes:
                self.scopes.pop(frame).close()
