"""Kinds of a decoder's layers: all alike, as lists of the config name them, or other ones first."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memfit.trace.new_family import Subject, noticed, refuse
from memfit.trace.probes import seen
from memfit.trace.program import configuration

FEW, MANY = 3, 7  # layers that run
DEPTHS = (37, 58)  # of configs that show how defaults of lists go on
PERIOD = 8
POPPED = re.compile(r"""kwargs\.pop\(\s*"(\w+)",\s*([^()]+)\)""")


@dataclass(frozen=True, kw_only=True)
class Layers:
    """`base`: fields of a small model that has every kind of layer. `lists`: what the class puts
    in place of each list that is not given, as what comes first and what is repeated then, or None
    where it is not known. `deciding`: fields that those depend on, as the class has them.
    `first`: the field that counts other layers in front. `odd`: "first" or "last",
    where that layer differs from the others of its kind."""

    base: Mapping[str, Any]
    lists: Mapping[str, tuple[list[Any], list[Any]] | None] = field(default_factory=dict)
    deciding: Mapping[str, Any] = field(default_factory=dict)
    first: str = ""
    odd: tuple[str, ...] = ()

    def data(self) -> dict[str, Any]:
        """As the row has it."""
        lists = {key: one and [list(part) for part in one] for key, one in self.lists.items()}
        odd = {"odd": list(self.odd)} if self.odd else {}
        return {"lists": lists, "deciding": dict(self.deciding), "first": self.first, **odd}


def layers_of(subject: Subject, given: Mapping[str, Any]) -> Layers:
    """What the config class says of layers, and the small model that has them all."""
    count = subject.key("num_hidden_layers")
    total = subject.whole[count]
    lists = {
        key: value
        for key, value in subject.whole.items()
        if isinstance(value, list) and len(value) == total > FEW and noticed(key)
    }
    base: dict[str, Any] = {count: FEW}
    if lists:
        rows = shortest(list(zip(*lists.values(), strict=True)))
        base = {key: [row[place] for row in rows] for place, key in enumerate(lists)}
        base[count] = len(rows)
    run = seen({"model_type": subject.kind, **given, **base}, subject.head)
    if isinstance(run, str):
        raise refuse(subject.kind, run)
    front = first_of(subject, {**given, **base})
    base, odd = (base, ()) if front else odd_of(subject, given, base, list(lists))
    return Layers(
        odd=odd,
        base={**base, **({front: 1} if front else {})},
        lists={key: pattern(subject, key) for key in lists},
        deciding=deciding_of(subject, list(lists)),
        first=front,
    )


def shortest(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The first layers, up to where there is one of every kind, at least three; each kind once
    where those are many, and the first of them twice."""
    kinds = list(dict.fromkeys(rows))
    end = max(rows.index(one) for one in kinds) + 1
    if end <= MANY:
        return list(rows[: max(FEW, end)])
    return [kinds[0], *kinds]


def pattern(subject: Subject, key: str) -> tuple[list[Any], list[Any]] | None:
    """What is first and what is repeated then, in the class's default of a list at any depth."""
    count = subject.key("num_hidden_layers")
    defaults = []
    for depth in DEPTHS:
        try:
            whole = configuration({"model_type": subject.kind, count: depth}, None).to_dict()
        except Exception:  # noqa: BLE001 - a class may insist on its own number of layers
            return None
        if not isinstance(whole.get(key), list) or len(whole[key]) != depth:
            return None
        defaults.append(whole[key])
    for ahead in range(PERIOD + 1):
        for period in range(1, PERIOD + 1):
            start, again = defaults[0][:ahead], defaults[0][ahead : ahead + period]
            if all(one == continued(start, again, len(one)) for one in defaults):
                return start, again
    return None


def continued(start: list[Any], again: list[Any], count: int) -> list[Any]:
    """So many entries of a list that begins so and goes on so."""
    rest = max(0, count - len(start))
    return [*start, *again * (rest // len(again) + 1)][:count]


def deciding_of(subject: Subject, lists: Sequence[str]) -> dict[str, Any]:
    """Fields that change the defaults of the lists."""
    before = {key: subject.plain.get(key) for key in lists}  # whatever lists are given
    found: dict[str, Any] = {}
    count = subject.key("num_hidden_layers")
    for key, value in subject.whole.items():
        if key in (count, *lists) or not noticed(key) or type(value) not in (int, bool):
            continue
        other = not value if isinstance(value, bool) else value + 1
        try:
            whole = configuration({"model_type": subject.kind, key: other}, None).to_dict()
        except Exception:  # noqa: BLE001 - a class may refuse the value
            continue
        if any(whole.get(one) != before[one] for one in lists):
            found[key] = value
    return {**found, **(popped(subject.kind) if lists else {})}


def popped(kind: str) -> dict[str, Any]:
    """Fields of older configs that the class replaces by others, with their values."""
    from transformers import CONFIG_MAPPING

    found: dict[str, Any] = {}
    for name, default in POPPED.findall(inspect.getsource(CONFIG_MAPPING[kind])):
        if "rope" not in name:
            with contextlib.suppress(ValueError, SyntaxError):  # what is no literal follows
                found[name] = ast.literal_eval(default)
    return found


def odd_of(
    subject: Subject, given: Mapping[str, Any], base: dict[str, Any], lists: Sequence[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Whether the first or the last layer differs in weights from others of its kind, and the small
    model with both."""
    count = subject.key("num_hidden_layers")
    longer = {**base, **{key: [base[key][0], *base[key], base[key][-1]] for key in lists}}
    longer[count] = base[count] + (2 if lists else 1)
    shapes = outline(subject, {**given, **longer})
    last = longer[count] - 1
    odd = []
    if shapes and layer(shapes, 0) != layer(shapes, 1 if lists else last - 1):
        odd.append("first")
    if shapes and layer(shapes, last) != layer(shapes, last - 1):
        odd.append("last")
    return (longer if odd and lists else base), tuple(odd)


def outline(subject: Subject, config: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes of a model's weights by name; nothing where the class refuses the config."""
    from memfit.trace.depth import shapes_of

    try:
        return dict(shapes_of({"model_type": subject.kind, **config}, subject.head))
    except Exception:  # noqa: BLE001 - a class may refuse the value
        return {}


def layer(shapes: Mapping[str, Any], number: int) -> list[Any]:
    """A layer's weights by their names in it."""
    mark = f".{number}."
    return [(name.partition(mark)[2], one) for name, one in shapes.items() if mark in name]


def first_of(subject: Subject, base: Mapping[str, Any]) -> str:
    """The field that says how many layers in front are other ones: with 0, 1 and 3 of them weights
    of as many layers have other names or shapes."""
    for key, value in subject.whole.items():
        small = type(value) is int and 0 <= value <= PERIOD and noticed(key)
        if not small or key in base:
            continue
        none, one = (outline(subject, {**base, key: number}) for number in (0, 1))
        if not (none and one) or layer(none, 0) != layer(none, 1) or none == one:
            continue
        if layer(one, 0) != layer(one, 1) and layer(one, 1) == layer(one, 2) == layer(none, 0):
            return key
    return ""


__all__ = ["Layers", "continued", "layers_of"]
