"""Makes the row of a language model with towers beside it, and compares it with the real code:
parameters tensor by tensor, and peaks with the trace's."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memfit.errors import InputError
from memfit.model.families import _rows, build, families, forget
from memfit.model.families._composite_rows import TEXT
from memfit.model.model import Model
from memfit.trace import classes
from memfit.trace.composite_row import (
    LAYERS,
    SIZES,
    TIE,
    Found,
    Outline,
    Parts,
    Sizes,
    fields_of,
    flat,
    head_of,
    others,
    outline,
    parts_of,
    ratios_of,
    runs_of,
    weights_of,
)
from memfit.trace.decoder_check import HEAD as ALONE
from memfit.trace.decoder_check import first_fault
from memfit.trace.family_check import unlike_buffers, unlike_parameters
from memfit.trace.new_family import noticed, refuse
from memfit.trace.probes import change, seen
from memfit.trace.program import configuration
from memfit.trace.versions import text_config

COUNTS = (
    *SIZES,
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
LARGE = 16
HEAD_SIZE = "head_dim"
TRAINED: tuple[dict[str, Any], ...] = (
    {"batch": 2, "seq": 200, "optimizer": "sgd"},
    {"batch": 3, "seq": 150, "packing": False, "precision": "autocast-bf16"},
    {"batch": 2, "seq": 120, "packing": False, "method": "lora", "checkpointing": "full"},
    {"batch": 2, "seq": 200, "method": "qlora", "checkpointing": "full"},
    # some classes have a loss of their own, which leaves out padding
    {"batch": 2, "seq": 130, "packing": False, "method": "lora"},
)
GENERATED: tuple[dict[str, Any], ...] = (
    {"batch": 9, "seq": 700, "new_tokens": 6, "task": "inference"},
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the language model is: what its names begin with alone and here, and its head's."""

    old: str
    new: str
    head: str


def composed(kind: str) -> bool:
    """Whether a type of models has a language model as a part."""
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return False
    return bool(head_of(configuration({"model_type": kind}, None)))


def made_composite(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The row; raises InputError where it does not agree with the real code."""
    own = configuration({"model_type": kind}, None)
    text = text_config(own).model_type
    why = ""
    for name, texts in texts_of(text, text_config(own)):
        parts = parts_of(kind, own, texts[0], given)
        place = place_of(parts, name)
        if place is None:
            why = f"no row for `{kind}`: its weights are not `{name}`'s" if name == text else why
            continue
        try:
            return made_with(parts, place, text, name, texts)
        except InputError as bad:
            why = bad.problems[0].message
            if name == text:
                raise
    if why:
        raise InputError.one(why, where="family")
    raise refuse(kind, f"its language model `{text}` has no row")


def texts_of(kind: str, own: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Families that the language model may be one of, with small configs of it: its own, else those
    with the same parameters."""
    known = families().get(kind)
    if known is not None and not known.heads:
        yield (
            kind,
            [
                {
                    **heads_apart(own, one),
                    "model_type": kind,
                    "pad_token_id": 0,
                    "max_position_embeddings": 4096,
                }
                for one in known.examples
                if "hidden_size" in one and "text_config" not in one
            ],
        )
        return
    text = {**short(own.to_dict()), "model_type": kind, "pad_token_id": 0}
    usual = _rows.parts()  # those that others are made of come first: several may agree
    named = sorted(families().items(), key=lambda pair: (-usual[pair[0]], pair[0]))
    some = [
        (name, one.examples[0])
        for name, one in named
        if not (one.heads or one.brought or "text_config" in one.examples[0])
    ]
    yield from ((name, [text]) for name, _ in some)
    for name, example in some:  # the class's own defaults may be no model of that family
        sizes = {key: one for key, one in example.items() if type(one) is int and key in text}
        sizes.pop("num_hidden_layers", None)
        yield name, [text | sizes | heads_of_size(own, example)]


def heads_of_size(own: Any, example: Mapping[str, Any]) -> dict[str, int]:
    """The size of a head, where a config says it and an example leaves it to the quotient."""
    known = "hidden_size" in example and "num_attention_heads" in example
    if not known or getattr(own, HEAD_SIZE, None) is None or HEAD_SIZE in example:
        return {}
    return {HEAD_SIZE: example["hidden_size"] // example["num_attention_heads"]}


def heads_apart(own: Any, text: Mapping[str, Any]) -> dict[str, Any]:
    """A config of the language model that says the size of its heads, where a config can: the whole
    one's class may take another than the quotient."""
    known = getattr(own, HEAD_SIZE, None) is not None and "num_attention_heads" in text
    if not known or HEAD_SIZE in text:
        return dict(text)
    return {HEAD_SIZE: 3 * text["hidden_size"] // text["num_attention_heads"] // 2, **text}


def short(text: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the first layers alone."""
    count = text.get("num_hidden_layers")
    return {
        key: value[:LAYERS] if isinstance(value, list) and len(value) == count else value
        for key, value in text.items()
        if value is not None
    } | {"num_hidden_layers": LAYERS}


def made_with(
    parts: Parts, place: Place, text: str, family: str, texts: list[dict[str, Any]]
) -> dict[str, Any]:
    """The row with a language model of this family."""
    found = fields_of(parts)
    found.silent, loud = quiet(parts, found.silent)
    found.fixed += loud
    runs = runs_of(parts, found, wider(texts))
    moved_by_text(parts, found)
    head = f"{place.head}.weight"
    idle = [one for one in parts.before if not one.startswith(place.new) and one != head]
    data = data_of(parts, found, runs, place, text)
    data["text"]["family"] = family
    names = list(parts.before)
    first = next(at for at, one in enumerate(names) if one.startswith(place.new))
    for key, some in (("ahead", names[:first]), ("behind", names[first:])):
        data[key] = weights_of(parts, found, runs, [one for one in some if one in idle])
    named = json.dumps([data["ahead"], data["behind"]])
    data["text"]["sizes"] = [key for key in SIZES if f"{TEXT}{key}" in named]
    data["last"] = last_of(parts, idle, head)
    large = [scaled(one) for one in texts] if family == text else texts
    (unseen,) = runs_of(parts, found, large, times=(1, 2), count=1)
    return checked(data, parts, unseen)


def quiet(parts: Parts, keys: list[str]) -> tuple[list[str], list[str]]:
    """Fields that change nothing of a pass of text, and those that do."""
    before = seen(parts.config(), parts.head)
    if isinstance(before, str):
        raise refuse(parts.kind, before)

    def outcome(some: list[str]) -> str:
        other = {key: others(key, parts.whole[key])[0] for key in some}
        return change(before, seen(parts.config(other), parts.head))

    if outcome(keys) == "nothing":
        return keys, []
    loud = [key for key in keys if outcome([key]) not in ("nothing", "fails")]
    return [key for key in keys if key not in loud], loud


def wider(texts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Language models of unrelated sizes."""
    return [
        {
            **one,
            "hidden_size": times * one["hidden_size"],
            "vocab_size": one["vocab_size"] + more,
            "intermediate_size": one["intermediate_size"] + 8 * more,
        }
        for one in texts
        for times, more in ((1, 0), (2, 56), (3, 120))
    ]


def scaled(text: Mapping[str, Any]) -> dict[str, Any]:
    """A language model that is larger than a tower, as in models that are published."""
    return {**text, **{key: LARGE * text[key] for key in SIZES if key in text}}


def last_of(parts: Parts, idle: list[str], head: str) -> str:
    """The module of the last parameter but the head, where it is none of the language model's. That
    of a bias is packed nevertheless (transformers 5.23 quantizers/base.py get_keys_to_not_convert:
    `linear.bias` is no module's name)."""
    named = (name for name, one in parts.before.items() if one.role != "buffer" and name != head)
    *_, last = named
    return last.removesuffix(".weight") if last in idle and last.endswith(".weight") else ""


def moved_by_text(parts: Parts, found: Found) -> None:
    """The weights that depend on a size of the language model."""
    for key in SIZES:
        if type(parts.text.get(key)) is not int:
            continue
        changed = parts.outline(text={**parts.text, key: 2 * parts.text[key]})
        if not isinstance(changed, str):
            moved = {one for one, held in changed.items() if held != parts.before.get(one)}
            found.moved[f"{TEXT}{key}"] = moved


def place_of(parts: Parts, family: str) -> Place | None:
    """Where the class has the language model, whose every weight must be one of the family's."""
    try:
        model = build({**parts.text, "model_type": family, TIE: False})
    except InputError:
        return None
    theirs = parts.untied
    first = next(model.embed[0].weights()).name
    old = f"{first.partition('.')[0]}."
    rest = first.removeprefix(old)
    for new in sorted(name.removesuffix(rest) for name in theirs if name.endswith(f".{rest}")):
        for head in sorted(one for one in theirs if one.endswith(f"{model.head.name}.weight")):
            place = Place(old=old, new=new, head=head.removesuffix(".weight"))
            if agrees(model, theirs, place):
                return place
    return None


def agrees(model: Model, theirs: Outline, place: Place) -> bool:
    ours = {
        place.new + one.name.removeprefix(place.old): one.shape
        for one in model.weights()
        if not one.name.startswith(model.head.name)
    }
    within = {
        name: one.shape
        for name, one in theirs.items()
        if name.startswith(place.new) and one.role != "buffer" and not name.startswith(place.head)
    }
    return ours == within


def data_of(
    parts: Parts, found: Found, runs: list[Sizes], place: Place, text: str
) -> dict[str, Any]:
    plain, whole = defaults_of(parts), dict(parts.whole)
    sizes = [*found.sizes, *found.depths]
    odd = (key for key, value in whole.items() if plain.get(key, value) != value)
    told = {*sizes, *found.flags, *found.fixed, *parts.equal, *parts.given, *odd}
    dims = {key: value for key, value in runs[0].dims.items() if key in found.sizes}

    def default(key: str) -> Any:
        """None where only the config can say it."""
        return plain.get(key, None if key in parts.given else whole[key])

    def unlike(key: str) -> bool:
        return key in told and plain.get(key) != whole[key] and key not in parts.given

    return {
        "type": parts.kind,
        "composite": True,
        "text": {
            "section": parts.section,
            "kind": text,
            "family": text,
            "old": place.old,
            "new": place.new,
            "head": place.head,
            "own_positions": False,
            "defaults": text_defaults(text) | defaults_inside(parts, text),
        },
        "heads": heads_of(parts),
        "sizes": {key: default(key) for key in sizes},
        "ratios": [[*pair, plain.get(pair[1])] for pair in ratios_of(parts, found)],
        "equal": parts.equal,
        "flags": {key: default(key) for key in found.flags},
        "fixed": {key: default(key) for key in found.fixed},
        "numbers": found.numbers,
        "silent": found.silent,
        "given": parts.given,
        "needed": sorted({key.partition(".")[0] for key in whole if "." in key and unlike(key)}),
        "ties": ties_of(parts, place),
        "hands_on_cache": False,
        **of_class(parts),
        "example": parts.config(dims, plainly(runs[0].text), told),
    }


def of_class(parts: Parts) -> dict[str, bool]:
    """What the class has or lacks unlike most."""
    own = configuration(parts.config(), None)
    found: Any = classes.classes(classes.builder(parts.head, own), own)[0]
    said = {
        "checkpoints": found.supports_gradient_checkpointing,
        "flash": found._supports_flash_attn,
    }
    has = {
        "own_loss": "shift_attention_mask" in inspect.getsource(found.forward),
        "whole_prompt": "logits_to_keep" not in inspect.signature(found.forward).parameters,
    }
    lacks = {key: False for key, one in said.items() if not one}
    return lacks | {key: True for key, one in has.items() if one}


def plainly(text: Mapping[str, Any]) -> dict[str, Any]:
    """A language model's config without what configs of all models have."""
    kept = ("model_type", TIE, "pad_token_id")
    return {key: value for key, value in text.items() if noticed(key) or key in kept}


def heads_of(parts: Parts) -> list[str]:
    """The heads that this class stands for: it may be the one for text alone, too."""
    own = configuration(parts.config(), None)
    named = [classes.builder(one, own) for one in (parts.head, ALONE)]
    same = all(named) and len({classes.names(one, own) for one in named}) == 1
    return [parts.head, ALONE] if same else [parts.head]


def ties_of(parts: Parts, place: Place) -> list[list[bool]]:
    """Whether the head is the embedding where the whole config says nothing, no or yes, and the
    language model's part then."""

    def tied(whole: bool | None, inner: bool | None) -> bool:
        text = {key: one for key, one in parts.text.items() if key != TIE}
        text |= {} if inner is None else {TIE: inner}
        config = {key: one for key, one in parts.config(text=text).items() if key != TIE}
        found = outline(config | ({} if whole is None else {TIE: whole}), parts.head)
        if isinstance(found, str):
            raise refuse(parts.kind, found)
        return f"{place.head}.weight" not in found

    return [[tied(whole, inner) for inner in (None, False, True)] for whole in (None, False, True)]


def defaults_of(parts: Parts) -> dict[str, Any]:
    """What is taken where a section is given that does not say, which may differ from what is taken
    without that section."""
    sections = {path.rpartition(".")[0] for path in parts.whole if "." in path}
    config: dict[str, Any] = {"model_type": parts.kind}
    for path in sorted(sections):
        place = config
        for one in path.split("."):
            place = place.setdefault(one, {})
        place["model_type"] = parts.whole[f"{path}.model_type"]
    own = configuration(config, None)
    return dict(flat(own, parts.section))


def text_defaults(text: str) -> dict[str, int | float]:
    """Whole numbers, and rates of dropout, that the language model's class has by default, whatever
    its sizes are."""

    def numbers(**changes: int) -> dict[str, int | float]:
        whole = configuration({"model_type": text, **changes}, None).to_dict()
        return {
            key: one
            for key, one in whole.items()
            if noticed(key) and (type(one) is int or ("drop" in key and type(one) is float and one))
        }

    plain = numbers()
    changed = {key: 4 * int(plain[key]) for key in COUNTS if key in plain}
    moved: set[str] = set()
    for name, value in changed.items():
        try:
            after = numbers(**{name: value})
        except Exception:  # noqa: BLE001 - a class may refuse the size
            return {}
        moved |= {key for key, one in plain.items() if key != name and after.get(key) != one}
    return {key: one for key, one in plain.items() if key not in moved}


def defaults_inside(parts: Parts, text: str) -> dict[str, int]:
    """Whole numbers that the whole config's class takes where that of the language model does not
    say: Voxtral's heads of 128."""
    config = {"model_type": parts.kind, parts.section: {"model_type": text}}
    inside = getattr(configuration(config, None), parts.section).to_dict()
    alone = configuration({"model_type": text}, None).to_dict()
    return {
        key: one
        for key, one in inside.items()
        if type(one) is int and noticed(key) and alone.get(key) != one
    }


# ------------------------------------------------------------------------------------------- check
def checked(data: dict[str, Any], parts: Parts, last: Sizes) -> dict[str, Any]:
    """The row as it agrees with the real code."""
    dims = {key: value for key, value in last.dims.items() if not key.startswith(TEXT)}
    deeper = {key: LAYERS + 1 + place for place, key in enumerate(parts.deep)}
    config = {**parts.config({**dims, **deeper}, last.text), "dtype": "bfloat16"}
    config = json.loads(json.dumps(config))
    why = ""
    for changes in variants(data):
        register(changes)
        why = fault_of(config, changes)
        if not why:
            return {**changes, **alone(config, changes)}
    raise refuse(parts.kind, why)


def alone(config: dict[str, Any], data: Mapping[str, Any]) -> dict[str, bool]:
    """Whether transformers has a class of the language model alone, which is answered, too."""
    if ALONE in data["heads"] or classes.builder(ALONE, configuration(config, None)) is None:
        return {}
    register({**data, "alone": True})
    wrong = unlike_parameters(config, ALONE) or first_fault(
        config, [{**one, "head": ALONE} for one in (*TRAINED, *GENERATED)]
    )
    return {} if wrong else {"alone": True}


def variants(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for hands in (False, True):
        for own in (False, True):
            text = {**data["text"], "own_positions": own}
            yield {**data, "text": text, "hands_on_cache": hands}


def fault_of(config: dict[str, Any], data: Mapping[str, Any]) -> str:
    """What is wrong with a row; empty where nothing is."""
    section, head = data["text"]["section"], data["heads"][0]
    for tied in (True, False):
        text = {**config[section], TIE: tied}
        if name := unlike_parameters({**config, section: text, TIE: tied}, head):
            return f"`{name}` is not as in transformers"
    if name := unlike_buffers(config, head):
        return f"the buffer `{name}` is not as in transformers"
    without = {} if data.get("checkpoints", True) else {"checkpointing": "none"}
    jobs = [{**one, "head": head, **without} for one in TRAINED]
    model = build(config)
    if model.graphs is None or not model.whole_prompt:  # no graph has the logits of a whole prompt
        jobs += [{**one, "head": head} for one in GENERATED]
    return first_fault(config, jobs)


def register(data: Mapping[str, Any]) -> None:
    forget(data["type"])
    _rows.register(data)


__all__ = ["composed", "made_composite"]
