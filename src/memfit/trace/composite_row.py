"""`memfit new-family`: the row of a language model with towers for images or sounds beside it. What
the idle weights depend on, and how, is found by building the class on the meta device."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from memfit.graph.solve import Solver, Unsolved
from memfit.job import Job
from memfit.model.families._composite_rows import PER, TEXT, size_of
from memfit.trace import classes
from memfit.trace.new_family import noticed, refuse
from memfit.trace.program import Options, built
from memfit.trace.versions import text_config

HEADED = ("image-text", "seq2seq-lm")  # heads of such classes, the usual one first
LAYERS, MANY, RUNS, UNSEEN, TRIES = 4, 13, 5, 3, 2000
TIMES = (1, 2, 3, 4, 5, 6, 7, 9)
OPTIONAL = re.compile(r'getattr\(\s*(?:self\.)?config,\s*"(\w+)"')
HEADS = re.compile(r".*\.num_(attention_)?heads")
SIZES = ("vocab_size", "hidden_size", "intermediate_size")  # of the language model
TIE = "tie_word_embeddings"


class Held(NamedTuple):
    """A parameter or buffer of the class."""

    shape: tuple[int, ...]
    role: str
    format: str


Outline = Mapping[str, Held]


@dataclass(kw_only=True)
class Parts:
    """A class of models with a text part. Fields have the names of their sections before them, as
    in `vision_config.hidden_size`."""

    kind: str
    head: str
    section: str
    text: Mapping[str, Any]
    whole: Mapping[str, Any]  # every field outside of the language model's section
    given: Mapping[str, Any]
    deep: list[str] = field(default_factory=list)  # fields that count layers
    base: dict[str, Any] = field(default_factory=dict)
    equal: dict[str, str] = field(default_factory=dict)  # fields that repeat another one

    def config(
        self,
        changes: Mapping[str, Any] | None = None,
        text: Mapping[str, Any] | None = None,
        only: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """A config of this class, with all of its fields or `only` some."""
        changes = changes or {}
        others = {key: changes[name] for key, name in self.equal.items() if name in changes}
        found: dict[str, Any] = {"model_type": self.kind, self.section: dict(text or self.text)}
        for key, value in {**self.whole, **self.base, **others, **changes}.items():
            if only is not None and key not in only:
                continue
            *sections, name = key.split(".")
            place = found
            for one in sections:
                place = place.setdefault(one, {})
            place[name] = value
        return found

    def outline(
        self, changes: Mapping[str, Any] | None = None, text: Mapping[str, Any] | None = None
    ) -> Outline | str:
        return outline(self.config(changes, text), self.head)

    def changed(self, key: str, value: Any) -> None:
        """Another base for what follows."""
        self.base[key] = value
        self.__dict__.pop("before", None)

    @cached_property
    def untied(self) -> Outline:
        """The same with a head of its own."""
        found = self.outline({TIE: False}, {**self.text, TIE: False})
        if isinstance(found, str):
            raise refuse(self.kind, found)
        return found

    @cached_property
    def before(self) -> Outline:
        found = self.outline()
        if isinstance(found, str):
            raise refuse(self.kind, found)
        return found


def outline(config: Mapping[str, Any], head: str) -> Outline | str:
    """What the class of this config has in memory, by name; or why it cannot be built."""
    try:
        _, model = built(config, Job(task="pretrain", head=head), Options())
    except Exception as bad:  # noqa: BLE001 - a class that fails on a config may raise anything
        return f"{type(bad).__name__}: {str(bad)[:200]}"
    found = {}
    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        for name, one in module.named_parameters(recurse=False):
            found[f"{dot}{name}"] = Held(tuple(one.shape), role(module, name), formatted(one))
        for name, one in module.named_buffers(recurse=False):
            found[f"{dot}{name}"] = Held(tuple(one.shape), "buffer", formatted(one))
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        name for name, _ in model.named_parameters()
    }
    return {name: one for name, one in found.items() if name not in shared}


def role(module: torch.nn.Module, name: str) -> str:
    if name == "bias":
        return "norm" if "Norm" in type(module).__name__ else "bias"
    if name != "weight":
        return "other"
    if isinstance(module, torch.nn.Embedding):
        return "embedding"
    if type(module) is torch.nn.Linear:  # others are not packed
        return "linear"
    return "norm" if "Norm" in type(module).__name__ else "other"


def formatted(tensor: torch.Tensor) -> str:
    return "" if tensor.dtype is torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------ fields
def head_of(own: Any) -> str:
    """The head of a class that reads images or sounds beside text; empty where there is none. An
    encoder with a decoder is another thing."""
    if text_config(own) is own or getattr(own, "is_encoder_decoder", False):
        return ""
    return next((one for one in HEADED if classes.builder(one, own) is not None), "")


def parts_of(kind: str, own: Any, text: Mapping[str, Any], given: Mapping[str, Any]) -> Parts:
    """The fields of a config class outside of its language model's section, `given` ones with
    other values than the class's defaults."""
    inner = text_config(own)
    section = next((key for key in own.sub_configs if getattr(own, key, None) is inner), "")
    if not section:
        raise refuse(kind, "its config has no part for a language model")
    head = head_of(own)
    whole = {**dict.fromkeys(unlisted(own, head)), **dict(flat(own, section))}
    source = source_of(own, head)
    if unknown := sorted(one for one in set(given) - set(whole) if f"config.{one}" not in source):
        raise refuse(kind, f"its config has no `{unknown[0][:60]}`")
    return Parts(
        kind=kind,
        head=head,
        section=section,
        text=text,
        whole={**whole, **given},
        given=dict(given),
    )


def unlisted(own: Any, head: str) -> list[str]:
    """Fields that the class's code reads where a config has them, and its config class lacks."""
    found = OPTIONAL.findall(source_of(own, head))
    return sorted(one for one in set(found) if not hasattr(own, one))


def source_of(own: Any, head: str) -> str:
    """The file of the class."""
    (cls,) = classes.classes(classes.builder(head, own), own)
    return inspect.getsource(inspect.getmodule(cls))  # type: ignore[arg-type]


def flat(own: Any, leave: str, path: str = "") -> Iterator[tuple[str, Any]]:
    """Fields of a config and of the configs inside it."""
    values = own.to_dict()
    for key, value in values.items():
        inner = getattr(own, key, None)
        if key == leave and not path:
            continue
        if key in own.sub_configs and hasattr(inner, "to_dict"):
            yield f"{path}{key}.model_type", value.get("model_type", "")
            yield from flat(inner, leave, f"{path}{key}.")
        elif key in own.sub_configs and value is None:
            yield f"{path}{key}", None
        elif (noticed(key) or key == "attention_dropout") and key != "model_type":
            yield f"{path}{key}", value


@dataclass(kw_only=True)
class Found:
    """What fields do to the weights outside of the language model."""

    sizes: list[str] = field(default_factory=list)
    depths: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)  # silent where they are no lists
    moved: dict[str, set[str]] = field(default_factory=dict)  # size -> names of weights


def fields_of(parts: Parts) -> Found:
    found = Found()
    for key in [key for key, value in parts.whole.items() if depth(parts, key, value)]:
        found.depths.append(key)
        parts.deep.append(key)
        parts.changed(key, LAYERS)
    if isinstance(parts.outline(), str):
        raise refuse(parts.kind, "it cannot be built with few layers")
    for key, value in sorted(parts.whole.items(), key=lambda one: type(one[1]) is not bool):
        if key not in found.depths:
            sort(parts, found, key, value)
    equals(parts, found)
    return found


def depth(parts: Parts, key: str, value: Any) -> bool:
    """Whether one more brings weights of another layer, and one less takes them away."""
    if type(value) is not int or value < 2:
        return False
    more = parts.outline({key: value + 1})
    if isinstance(more, str) or not parts.before.keys() < more.keys():
        return False
    new = more.keys() - parts.before.keys()
    less = parts.outline({key: LAYERS})
    return all(f".{value}." in name for name in new) and not isinstance(less, str)


def sort(parts: Parts, found: Found, key: str, value: Any) -> None:
    """What other values of one field change."""
    kinds: set[str] = set()
    for other in others(key, value):
        after = parts.outline({key: other})
        if isinstance(after, str):
            kinds.add("fails")
        elif after == parts.before:
            kinds.add("nothing")
        elif after.keys() == parts.before.keys():
            kinds.add("shapes")
            names = {name for name, one in after.items() if one != parts.before[name]}
            found.moved.setdefault(key, set()).update(names)
        elif type(value) is bool and flag(parts, found, key, other, after):
            return
        else:
            kinds.add("names")
    whole = type(value) is int
    if whole and "shapes" in kinds and "names" not in kinds:
        found.sizes.append(key)
    elif kinds == {"nothing"} or (whole and kinds == {"nothing", "fails"}):
        found.silent.append(key)
        if whole and parts.outline({key: [value, value]}) != parts.before:
            found.numbers.append(key)
    else:
        found.fixed.append(key)


def flag(parts: Parts, found: Found, key: str, other: bool, after: Outline) -> bool:
    """Whether a field only brings weights, or only takes them away; the base has them all."""
    if parts.before.keys() < after.keys():
        parts.changed(key, other)
    elif not after.keys() < parts.before.keys():
        return False
    found.flags.append(key)
    return True


def others(key: str, value: Any) -> list[Any]:
    """Other values that a field may have."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value + (value == 0), 3 * value + (value == 0), value + 1, max(1, value // 2)]
    if isinstance(value, float):
        return [2 * value + 0.25, value / 4]
    if isinstance(value, str):
        return ["relu", "silu"] if "act" in key else ["other"]
    if isinstance(value, list) and value:
        return [value[:-1], [*value, value[-1]], [*value[1:], value[0]]]
    if isinstance(value, dict) and value:
        scaled = {key: 2 * one if type(one) in (int, float) else one for key, one in value.items()}
        return [scaled]
    return [1, 0.5, True, "relu", [1]]


def equals(parts: Parts, found: Found) -> None:
    """Fields that only change together with another one, to the same value."""
    for key in list(found.fixed):
        value = parts.whole[key]
        if type(value) is not int or value < 1 or key not in found.fixed:
            continue
        for name in [*found.sizes, *found.fixed]:
            if name == key or parts.whole[name] != value or name in parts.equal:
                continue
            both = parts.outline({key: 2 * value, name: 2 * value})
            if isinstance(both, str) or both.keys() != parts.before.keys():
                continue
            parts.equal[key] = name
            found.fixed.remove(key)
            moved = {one for one, held in both.items() if held != parts.before[one]}
            found.moved.setdefault(name, set()).update(moved)
            if name in found.fixed:
                found.fixed.remove(name)
                found.sizes.append(name)
            break


def ratios_of(parts: Parts, found: Found) -> list[tuple[str, str]]:
    """Numbers that must divide a size of their section: those that do not are refused."""
    pairs = []
    for small in [key for key in found.silent if type(parts.whole[key]) is int]:
        value = parts.whole[small]
        if value < 2 or not isinstance(parts.outline({small: value + 1}), str):
            continue
        for large in found.sizes:
            same = large.rpartition(".")[0] == small.rpartition(".")[0]
            if not same or parts.whole[large] % value or parts.whole[large] % (value + 1) == 0:
                continue
            times = parts.whole[large] // value * (value + 1)
            if not isinstance(parts.outline({small: value + 1, large: times}), str):
                pairs.append((large, small))
                break
    return pairs


# ------------------------------------------------------------------------------------------- sizes
class Sizes(NamedTuple):
    """Sizes that the class can be built with, and what it has then."""

    dims: Mapping[str, int]
    text: Mapping[str, Any]
    held: Outline


def runs_of(
    parts: Parts,
    found: Found,
    texts: Sequence[Mapping[str, Any]],
    times: Sequence[int] = TIMES,
    count: int = RUNS + UNSEEN,
) -> list[Sizes]:
    """Unrelated sizes, the class's times some of these; the last ones are to be foretold."""
    draw, runs, why = random.Random(0), list[Sizes](), ""
    for turn in range(TRIES):
        text = texts[turn % len(texts)]
        dims = {key: parts.whole[key] * draw.choice(times) for key in found.sizes}
        if uneven(parts, dims):
            continue
        held = parts.outline(dims, text)
        if isinstance(held, str):
            why = held
            continue
        if held.keys() - parts.before.keys():
            why = "it has other weights with other sizes"
            continue
        if any(0 in one.shape for one in held.values()):
            why = "it has empty weights"
            continue
        words = {f"{TEXT}{key}": text[key] for key in SIZES if type(text.get(key)) is int}
        runs.append(Sizes({**dims, **words}, text, held))
        if len(runs) == count:
            return runs
    raise refuse(parts.kind, f"no sizes were found that it can be built with: {why}")


def uneven(parts: Parts, dims: Mapping[str, int]) -> bool:
    """Whether heads are of a size that no model has: rotary positions take half of a half."""
    return any(
        dims[large] % (8 * (dims.get(small) or parts.whole[small]))
        for small in parts.whole
        if HEADS.fullmatch(small) and type(parts.whole[small]) is int
        for large in dims
        if large == f"{small.rpartition('.')[0]}.hidden_size"
    )


def quotients(dims: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """Sizes as they are and how often one goes into another one."""
    some = [name for name in names if not name.startswith(TEXT)]
    return {name: dims[name] for name in names} | {
        f"{one}{PER}{other}": dims[one] // dims[other]
        for one in some
        for other in some
        if one != other and dims[one] > dims[other]
    }


def solved(parts: Parts, runs: Sequence[Sizes], name: str, moving: Sequence[str]) -> list[Any]:
    """The shape of one weight in terms of the sizes that move it."""
    seen, later = runs[:RUNS], runs[RUNS:]
    some = [quotients(one.dims, moving) for one in seen]
    known = set.intersection(*map(set, some))
    some = [{key: one[key] for key in one if key in known} for one in some]
    axes = zip(*(one.held[name].shape for one in seen), strict=True)
    try:
        solver = Solver(some) if moving else None
        shape = [sizes[0] if solver is None else solver.solved(sizes) for sizes in axes]
    except Unsolved as bad:
        raise refuse(parts.kind, f"`{name}`: {bad}") from None
    for one in later:
        dims = quotients(one.dims, moving)
        if one.held[name].shape != tuple(size_of(item, dims) for item in shape):
            raise refuse(parts.kind, f"no exact expression gives the shape of `{name}`")
    return shape


# ------------------------------------------------------------------------------------------ weights
def weights_of(parts: Parts, found: Found, runs: Sequence[Sizes], idle: Iterable[str]) -> list[Any]:
    """The weights outside of the language model in order, those of layers once."""
    layered = dict(layers(parts, found))
    conditions = dict(flagged(parts, found))
    rows: list[Any] = []
    for name in idle:
        key, template, kind = layered.get(name, ("", name, 0))
        if kind < 0:
            continue
        row = [template, *weight(parts, found, runs, name), *conditions.get(name, ())]
        if not key:
            rows.append(row)
            continue
        if not (rows and isinstance(rows[-1], dict) and rows[-1]["layers"] == key):
            rows.append({"layers": key, "kinds": []})
        kinds = rows[-1]["kinds"]
        if kind == len(kinds):
            kinds.append([])
        kinds[kind].append(row)
    return rows


def weight(parts: Parts, found: Found, runs: Sequence[Sizes], name: str) -> tuple[Any, str, str]:
    """Shape, role and format of a weight."""
    texts = (f"{TEXT}{key}" for key in SIZES)
    moving = [one for one in (*found.sizes, *texts) if name in found.moved.get(one, ())]
    held = parts.before[name]
    return solved(parts, runs, name, moving), held.role, held.format


def layers(parts: Parts, found: Found) -> Iterator[tuple[str, tuple[str, str, int]]]:
    """Weights of layers: the field that counts them, their name with the number left open, and
    which of the kinds of layers that follow each other has it; -1 for those of later layers."""
    for key in found.depths:
        more, last = (parts.outline({key: count}) for count in (MANY, MANY - 1))
        if isinstance(more, str) or isinstance(last, str):
            raise refuse(parts.kind, f"it cannot be built with `{key}` = {MANY}")
        for stem in {name[: name.rindex(f".{MANY - 1}.")] for name in more.keys() - last.keys()}:
            outlines = [within(more, f"{stem}.{number}.") for number in range(MANY)]
            period = period_of(outlines)
            if not period:
                raise refuse(parts.kind, f"the layers of `{stem}` are unlike")
            for number in range(LAYERS):
                kind = number if number < period else -1
                for rest in outlines[number]:
                    yield f"{stem}.{number}.{rest}", (key, f"{stem}.{{}}.{rest}", kind)


def within(some: Outline, start: str) -> Outline:
    """What begins so, by the rest of its name."""
    return {name.removeprefix(start): held for name, held in some.items() if name.startswith(start)}


def period_of(layers: Sequence[Outline]) -> int:
    """After how many layers there is one like the first again; 0 for never."""
    for period in range(1, LAYERS + 1):
        if all(one and one == layers[at % period] for at, one in enumerate(layers)):
            return period
    return 0


def flagged(parts: Parts, found: Found) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Weights that are there only with a field as it is in the base."""
    for key in found.flags:
        kept = bool(parts.base.get(key, parts.whole[key]))
        after = parts.outline({key: not kept})
        assert not isinstance(after, str)
        for name in parts.before.keys() - after.keys():
            yield name, (key, kept)


__all__ = [
    "LAYERS",
    "SIZES",
    "TIE",
    "Found",
    "Outline",
    "Parts",
    "Sizes",
    "fields_of",
    "flat",
    "head_of",
    "others",
    "outline",
    "parts_of",
    "ratios_of",
    "runs_of",
    "weights_of",
]
