"""config.json -> Model, one file a family. A file registers itself under the `model_type`s it
reads; nobody else names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from memfit.errors import InputError
from memfit.lazy_dataclass import dataclass
from memfit.model import quantized
from memfit.model.classes import named_head
from memfit.model.config import Fields
from memfit.model.equivalents import converted
from memfit.model.label_heads import LabelRow, with_labels
from memfit.model.model import Model
from memfit.registry import nearest

Build = Callable[[Fields], Model]
Alone = Callable[[Model], Model]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """`example` is a small config of every kind the family knows, used by the conformance tests.
    `brought`: whose code came with its checkpoints, and is not transformers'. `graphs`: it runs by
    captured graphs, which answer fewer jobs. `heads`: those of `job.head` that an encoder has, the
    usual one for training first. `label_heads`: a decoder's heads of labels. `alone` gives the
    language model of a composite, which is another class of transformers."""

    name: str
    model_types: tuple[str, ...]
    build: Build
    examples: tuple[Mapping[str, Any], ...]
    brought: bool = False
    graphs: bool = False
    heads: tuple[str, ...] = ()
    label_heads: tuple[LabelRow, ...] = ()
    alone: Alone | None = None


_FAMILIES: dict[str, Family] = {}


def family(
    *model_types: str,
    examples: tuple[Mapping[str, Any], ...],
    brought: bool = False,
    graphs: bool = False,
    heads: tuple[str, ...] = (),
    label_heads: tuple[LabelRow, ...] = (),
    alone: Alone | None = None,
) -> Callable[[Build], Build]:
    """Decorator of a family's `build`: `@family("llama", examples=(…,))`."""

    def add(build: Build) -> Build:
        one = Family(
            name=model_types[0],
            model_types=model_types,
            build=build,
            examples=examples,
            brought=brought,
            graphs=graphs,
            heads=heads,
            label_heads=label_heads,
            alone=alone,
        )
        for model_type in model_types:
            if model_type in _FAMILIES:
                raise ValueError(f"model_type `{model_type}` has two families")
            _FAMILIES[model_type] = one
        return build

    return add


def known(model_type: str) -> bool:
    """Whether a family of this type is registered."""
    return model_type in _FAMILIES


def forget(model_type: str) -> None:
    """Let a family be registered anew."""
    _FAMILIES.pop(model_type, None)


@cache
def families() -> Mapping[str, Family]:
    """Every `model_type` with its family. A family's file must be named after one of the types it
    reads."""
    import_modules()
    import_module(f"{__name__}._rows").load_all()
    return _FAMILIES


def import_modules() -> None:
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")


def written_by_hand(model_type: str) -> bool:
    """Whether a module reads this type; others are described by a file of data."""
    described = import_module(f"{__name__}._rows").names()
    import_modules()
    return model_type in _FAMILIES and model_type not in described


def find(model_type: str) -> Family:
    """The family of a `model_type`; the file of that name is tried first, so that one question
    loads one file."""
    file = model_type.replace("-", "_")
    if model_type not in _FAMILIES and file.isidentifier():
        try:
            import_module(f"{__name__}.{file}")
        except ModuleNotFoundError:
            if not import_module(f"{__name__}._rows").load(model_type):
                families()
    if model_type in _FAMILIES:
        return _FAMILIES[model_type]
    close = nearest(model_type, families(), 1)
    near = f"; the nearest supported one is `{close[0]}`" if close else ""
    raise InputError.one(
        f"not supported yet: model_type `{model_type[:60]}`{near}",
        where="config.model_type",
        hint="`--by trace` runs the real code instead (extra `trace`)",
    )


def named_row(one: Family, config: Mapping[str, Any]) -> LabelRow | None:
    """The head of labels that the config's `architectures` name."""
    named = named_head(config, [row.head for row in one.label_heads])
    return next((row for row in one.label_heads if row.head == named), None)


def build(config: Mapping[str, Any], *, name: str = "", origin: str = "") -> Model:
    """The Model of a parsed config.json."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise InputError.one(
            "`model_type` is missing",
            where="config.model_type",
            hint="is this the config.json of a transformers model?",
        )
    known = converted(config)
    model_type, fields = str(known["model_type"]), Fields(known)
    one = find(model_type)
    model = quantized.apply(one.build(fields), fields)
    row = named_row(one, known)
    if row is not None:
        model = with_labels(model, row, fields)
    fields.done()
    from dataclasses import replace

    return replace(
        model,
        name=name or model_type,
        origin=origin,
        config=config,
        assumed=tuple(fields.taken.items()),
    )
