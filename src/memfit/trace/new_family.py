"""`memfit new-family`: the row of an encoder from its config class in transformers. Every statement
of the row is the outcome of a run on fake tensors with that field changed."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from memfit.errors import InputError
from memfit.model.families._chains import CAUSAL
from memfit.model.families._headless import NONE
from memfit.trace import classes
from memfit.trace.bare_model import of_bare
from memfit.trace.family_sizes import WIDE, columns, proposed
from memfit.trace.graph_files import SILENT
from memfit.trace.pair_row import HEAD as PAIR
from memfit.trace.pair_row import (
    POSITIONS,
    alone,
    base_of,
    following,
    hears,
    other_tables,
    skips,
    stacks_of,
)
from memfit.trace.probes import SEQ, Change, Seen, change, seen
from memfit.trace.program import configuration
from memfit.trace.real_positions import BEYOND, MOST, positions_left

LAYERS = 3
RATES = (0.11, 0.13, 0.17, 0.19, 0.23, 0.29, 0.31, 0.37)
ORDER: tuple[Change, ...] = ("nothing", "rates", "shapes", "code", "fails")
# A config without these is no config of a model, whatever the class puts in their place.
DECISIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
IDS = re.compile(r".*_token_id|.*token_index|.*_token_ids|.*suppress_tokens")
NUMBERS = re.compile(r".*_token_id|.*token_index|.*pad_id|.*padding_idx")  # of rows in a table
LONGER = 200  # tokens, more than any capture has
LENGTHS = (24, 100, 331, 509, 1031, 2053, 4090)  # tokens of sequences that must run the same code


@dataclass(kw_only=True)
class Subject:
    """A type of models while its row is found out. `base`: what is changed of its defaults in every
    run; `before`: the pass of each head with these."""

    kind: str
    whole: Mapping[str, Any]  # the class's defaults with the fields that were given
    plain: Mapping[str, Any]  # the class's defaults
    names: dict[str, str]  # usual names of fields, and what this class calls them
    base: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Seen] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # heads, and why
    equal: dict[str, str] = field(default_factory=dict)  # fields that repeat a size
    stacks: dict[str, str] = field(default_factory=dict)  # of an encoder with a decoder
    head: str = CAUSAL  # a decoder's
    longest: int = 0  # tokens beyond which other code runs; 0 for none
    beyond: dict[str, Seen] = field(default_factory=dict)  # the pass of each head with one more

    def key(self, usual: str) -> str:
        return self.names.get(usual, usual)

    def config(self, **changes: Any) -> dict[str, Any]:
        return {"model_type": self.kind, **self.base, **changes}

    def changed(self, **changes: Any) -> Change:
        """What these fields change in any head; a head that fails ends it."""
        others = {key: changes[name] for key, name in self.equal.items() if name in changes}
        changes = {**others, **changes}
        found: Change = "nothing"
        runs = [(head, before, SEQ) for head, before in self.before.items()]
        runs += [(head, before, self.longest + 1) for head, before in self.beyond.items()]
        for head, before, length in runs:
            one = change(before, seen(self.config(**changes), head, length))
            found = max(found, one, key=ORDER.index)
            if found == "fails":
                break
        return found


PLAIN = "Simple"  # ends the names of classes that answer questions without beams


def refuse(kind: str, why: str, hint: str = "") -> InputError:
    return InputError.one(f"no row for `{kind}`: {why}", where="family", hint=hint)


def row_data(
    kind: str, given: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The row of a type of models as data, and the heads that it leaves out, with why. `given` are
    fields that have other values than the class's defaults."""
    given = given or {}
    subject = subject_of(kind, given)
    layers, counts = counts_of(subject)
    subject.base = {**given, **dict.fromkeys(counts, LAYERS), **per_layer(subject, layers)}
    subject.base |= base_of(subject) if subject.stacks else low_ids(subject)
    rates = rates_of(subject)
    dims, equal, fixed = sizes_of(subject, layers, rates)
    if not dims:
        raise refuse(kind, "no field of its config is a size that may vary alone")
    subject.equal = equal
    ratios = ratios_of(subject, dims)
    dims = [key for key in dims if not picky(subject, key, dims, ratios)]
    dims, ratios, sizes = drawn(subject, dims, ratios)
    unlike = unlike_of(subject, dims, ratios)
    own = [key for key, name in equal.items() if followed(subject, key, [name]) != name]
    lengths(subject, dims)
    held = {*counts, *of_stacks(subject), *rates, *dims, *equal}
    quiet = silent(subject, {*held, *fixed})
    positions = subject.key("max_position_embeddings")
    before = unused_positions(subject, first(sizes), positions)
    usual = {name: key for key, name in subject.names.items()}
    named = {usual.get(key, key): key for key in dims}
    back = {key: name for name, key in named.items()}
    endless = [one for one in subject.before if one not in subject.beyond]
    return {
        "type": kind,
        "layers": layers,
        "kinds": ["layer"],
        **pair_data(subject),
        "dims": named,
        "ratios": [[back[large], back[small]] for large, small in ratios],
        "equal": {key: back[name] for key, name in equal.items()},
        "unlike": [[back[one], back[other]] for one, other in unlike],
        "fixed": fixed_of(subject, {*held, *quiet}),
        "base": subject.base,
        "sizes": {key: list(values) for key, values in sizes.items()},
        "heads": list(subject.before),
        "rates": rates,
        "silent": [
            *(key for key in quiet if not SILENT.fullmatch(key)),
            *equal,
            *of_stacks(subject),
        ],
        "absent": absent(subject, held),
        "positions": positions,
        "limited": before is not None,
        **({"longest": subject.longest} if subject.longest else {}),
        **({"endless": endless} if subject.longest and endless else {}),
        "before": before or 0,
        "checkpoints": checkpoints(subject),
        **of_classes(subject),
        **of_bare(subject),
        "refused": [],
        "given": dict(given),
        "defaults": {
            key: subject.plain[key]
            for key in (*dims, *own, *given)
            if key not in map(subject.key, DECISIVE) and subject.plain[key] is not None
        },
    }, subject.left_out


def counts_of(subject: Subject) -> tuple[str, list[str]]:
    """The field that counts layers, and all such fields: an encoder with a decoder has two."""
    if not subject.stacks:
        layers = subject.key("num_hidden_layers")
        if not isinstance(subject.whole.get(layers), int):
            raise refuse(subject.kind, f"its config has no integer `{layers}`")
        return layers, [layers]
    return next(iter(subject.stacks)), list(subject.stacks)


def pair_data(subject: Subject) -> dict[str, Any]:
    """What a row says of a decoder beside the encoder. `stacks`: the fields that count layers of
    each, and the kinds of the first of them. `tied`: how the head was captured; `unties`: whether
    the class runs otherwise with the other."""
    if not subject.stacks:
        return {}
    tied = bool(subject.plain.get("tie_word_embeddings", True))
    names = following(subject, list(subject.stacks))
    kinds = ["encoder"], ["decoder"]
    return {
        "pairs": True,
        "stacks": [[names[key], some] for key, some in zip(subject.stacks, kinds, strict=True)],
        "stack": alone(subject),
        **({"hears": True} if hears(subject) else {}),
        "tied": tied,
        "unties": subject.changed(tie_word_embeddings=not tied) != "nothing",
    }


def low_ids(subject: Subject) -> dict[str, int]:
    """Numbers of tokens and tags that the tables of small models do not have."""
    return {
        key: 1
        for key, value in subject.whole.items()
        if type(value) is int and value >= WIDE and NUMBERS.fullmatch(key)
    }


def of_stacks(subject: Subject) -> list[str]:
    """The fields that count layers of an encoder and a decoder, or say how often one is skipped."""
    return [*subject.stacks, *skips(subject.whole)] if subject.stacks else []


def unused_positions(subject: Subject, sizes: Mapping[str, int], positions: str) -> int | None:
    """How many positions no token has; None where sequences may be longer. A table that grows with
    its sequence is a limit, too: other code runs then."""
    head = next(iter(subject.before))
    left = positions_left(subject.config(**sizes), positions, head)
    if left is not None or positions not in sizes:
        return left
    config, count = subject.config(**sizes), sizes[positions]
    before = seen(config, head)

    def alike(length: int) -> bool:
        after = seen(config, head, seq=length, target=length)
        return not isinstance(before, str) and change(before, after) == "shapes"

    if alike(count + BEYOND):
        return None
    left = next((one for one in range(MOST) if alike(count - one)), None)
    if left is None:
        raise refuse(subject.kind, f"other code runs on {count} tokens")
    return left


def noticed(key: str) -> bool:
    """Whether a field is one of the model's own, and no id of a token."""
    return not (key in of_every_model() or key.startswith("_") or IDS.fullmatch(key))


@cache
def of_every_model() -> frozenset[str]:
    """What configs of all models have, and what formulas read in their own way."""
    from transformers import PretrainedConfig

    return frozenset(PretrainedConfig().to_dict()) | {"tie_word_embeddings", "use_cache"}


def first(sizes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    return {key: values[0] for key, values in sizes.items()}


def subject_of(kind: str, given: Mapping[str, Any] | None = None) -> Subject:
    """The defaults of its config class, but for the fields that are `given`."""
    from transformers import CONFIG_MAPPING

    from memfit.registry import nearest

    if kind not in CONFIG_MAPPING:
        close = nearest(kind, list(CONFIG_MAPPING), 1)
        hint = f"did you mean `{close[0]}`?" if close else ""
        raise refuse(kind[:60], "the installed transformers has no such model type", hint)
    plain = configuration({"model_type": kind}, None).to_dict()
    if unknown := sorted(set(given or {}) - set(plain)):
        close = nearest(unknown[0], list(plain), 1)
        hint = f"did you mean `{close[0]}`?" if close else ""
        raise refuse(kind, f"its config has no `{unknown[0][:60]}`", hint)
    own = configuration({"model_type": kind, **(given or {})}, None)
    names = dict(type(own).attribute_map)
    found = Subject(kind=kind, whole=own.to_dict(), plain=plain, names=names)
    if paired(own):
        found.names |= {usual: name for usual, name in POSITIONS.items() if name in found.whole}
        found.stacks = stacks_of(found)
        if len(found.stacks) != 2:
            fields = ", ".join(f"`{one}`" for one in found.stacks) or "none"
            why = f"two fields must count the layers of its encoder and decoder, found {fields}"
            raise refuse(kind, why)
    return found


def language_head(own: Any) -> str:
    """The head of a model that goes on with a text, which some classes have under that of images
    alone; empty for none."""
    heads = (CAUSAL, "image-text")
    return next((one for one in heads if classes.builder(one, own) is not None), "")


def paired(own: Any) -> bool:
    """Whether a class of this config has a decoder beside its encoder."""
    return bool(getattr(own, "is_encoder_decoder", False))


def per_layer(subject: Subject, layers: str) -> dict[str, Any]:
    """Lists with an entry a layer, cut to as many as are run."""
    return {
        key: value[:LAYERS]
        for key, value in subject.whole.items()
        if isinstance(value, list) and len(value) == subject.whole[layers] > LAYERS
    }


# ------------------------------------------------------------------------------------------- rates
def rates_of(subject: Subject) -> dict[str, float | str]:
    """Fields that give rates of dropout, each with the class's default: each has a value of its own
    in the run and appears as such. Sets the base, and the heads that run."""
    named = [
        key
        for key, value in subject.whole.items()
        if "drop" in key
        and (value is None or type(value) in (int, float))
        and "layerdrop" not in key
    ]
    given = dict(zip(named, RATES, strict=False))
    runs: dict[str, Seen] = {}
    pair = (PAIR,) if subject.stacks else ()
    own = configuration(subject.whole, None)
    encodes = classes.builder("masked-lm", own) is not None
    ahead = (CAUSAL,) if not (subject.stacks or encodes) else ()  # the usual head comes first
    decodes = (CAUSAL,) if subject.stacks or "is_decoder" in subject.whole or one_class(own) else ()
    heads = (*pair, *ahead, *classes.SILENT[1:], *classes.SILENT[:1], *decodes)
    for head in dict.fromkeys(one for one in heads if one != NONE):
        if classes.builder(head, configuration(subject.config(), None)) is None:
            continue
        found = seen(subject.config(**given), head)
        if isinstance(found, str):
            subject.left_out[head] = found
        else:
            runs[head] = found
    if not runs and "dtype" not in subject.base:  # some code runs in fp32 alone
        subject.base["dtype"] = "float32"
        subject.left_out.clear()
        return rates_of(subject)
    if not runs:
        why = next(iter(subject.left_out.values()), "transformers has no class with a head for it")
        raise refuse(subject.kind, why)
    shown = {rate for one in runs.values() for rate in one.rates if rate}
    if unknown := sorted(shown - set(given.values())):
        raise refuse(subject.kind, f"no field of its config gives the dropout rate {unknown[0]}")
    used = {key: rate for key, rate in given.items() if rate in shown}
    subject.base |= used
    for head in runs:
        again = seen(subject.config(), head)
        assert not isinstance(again, str)
        subject.before[head] = again
    return {key: default_rate(subject, key, used) for key in used}


def one_class(own: Any) -> bool:
    """Whether the class that fills gaps in a text is also the one that goes on with it."""
    heads = [classes.builder(one, own) for one in ("masked-lm", CAUSAL)]
    return all(heads) and len({classes.names(one, own) for one in heads}) == 1


def default_rate(subject: Subject, key: str, used: Mapping[str, float]) -> float | str:
    """The class's default: a number, or the field that stands for an absent one."""
    default = subject.whole[key]
    if default is not None:
        return float(default)
    fields = {rate: name for name, rate in used.items()}
    for head, before in subject.before.items():
        after = seen(subject.config(**{key: None}), head)
        if isinstance(after, str):
            raise refuse(subject.kind, f"`{key}` null: {after}")
        if len(after.rates) != len(before.rates):
            return 0.0
        for old, new in zip(before.rates, after.rates, strict=True):
            if old == used[key]:
                return fields[new] if new in fields else float(new or 0.0)
    return 0.0


# ------------------------------------------------------------------------------------------- sizes
def sizes_of(
    subject: Subject, layers: str, rates: Iterable[str], *, following: bool = True
) -> tuple[list[str], dict[str, str], list[str]]:
    """Integers that move shapes and no operation; those that must equal one of these; and those
    that the code depends on. `following`: what the class puts in place of a field must be there."""
    asked = [
        key
        for key, value in subject.whole.items()
        if type(value) is int
        and value > 0
        and key not in (layers, *rates, *subject.equal)
        and noticed(key)
    ]
    outcome = {key: varied(subject, key) for key in asked}
    dims = [key for key, found in outcome.items() if found == "shapes"]
    equal = dict(subject.equal)
    fixed: list[str] = []
    for key in asked:
        follows = followed(subject, key, dims)
        if follows and (following or outcome[key] != "shapes"):
            equal[key] = follows
        elif outcome[key] == "fails":
            pair = together(subject, key, [one for one in asked if one != key])
            if pair in dims:
                equal[key] = pair
            elif pair and pair not in equal and goes_first(subject, pair, key):
                dims.append(pair)
                equal[key] = pair
            elif not pair:
                fixed.append(key)
        elif outcome[key] == "code":
            fixed.append(key)
    dims = [key for key in dims if key not in equal]
    return dims, equal, fixed


def drawn(
    subject: Subject, dims: list[str], ratios: list[tuple[str, str]]
) -> tuple[list[str], list[tuple[str, str]], dict[str, tuple[int, ...]]]:
    """The sizes with values for small models. If one cannot vary with the others (ConvBERT's ratio
    of heads, the width of a convolution, which must be odd), it keeps its default."""
    try:
        return dims, ratios, columns(subject, dims, ratios, subject.equal, proposed)
    except InputError:
        decisive = [subject.key(one) for one in DECISIVE]
        for key in dims:
            if key in decisive:
                continue
            rest = [one for one in dims if one != key]
            pairs = [one for one in ratios if key not in one]
            with contextlib.suppress(InputError):
                return rest, pairs, columns(subject, rest, pairs, subject.equal, proposed)
        raise


def goes_first(subject: Subject, one: str, other: str) -> bool:
    """Of two fields that must be equal, whether the first one is called the size."""
    usual = [subject.key(name) for name in DECISIVE]
    return one in usual or (other not in usual and one < other)


def varied(subject: Subject, key: str) -> Change:
    """What other values of one field change: of those that run, the gravest."""
    value = subject.whole[key]
    found = [subject.changed(**{key: other}) for other in (2 * value, 3 * value)]
    if all(one == "fails" for one in found):
        found = [subject.changed(**{key: other}) for other in (value + 1, max(1, value // 2))]
    runs = [one for one in found if one != "fails"]
    return max(runs, key=ORDER.index) if runs else "fails"


def picky(
    subject: Subject, key: str, dims: Sequence[str], ratios: Sequence[tuple[str, str]]
) -> bool:
    """Whether some values do not run, for another reason than that they divide nothing: then only
    the default is known to."""
    if any(key in pair for pair in ratios) or subject.whole[key] >= WIDE:
        return False
    value = subject.whole[key]
    return any(subject.changed(**{key: other}) == "fails" for other in (value + 1, 2 * value))


def followed(subject: Subject, key: str, dims: Sequence[str]) -> str:
    """The size that the class puts in place of this field where it is not given."""
    for name in dims:
        if name == key or subject.whole[name] != subject.whole[key]:
            continue
        twice = 2 * subject.whole[name]
        whole = configuration(subject.config(**{name: twice}), None).to_dict()
        if whole[key] == twice:
            return name
    return ""


def together(subject: Subject, key: str, others: Sequence[str]) -> str:
    """The field that has to change with this one, to the same value."""
    value = subject.whole[key]
    for name in others:
        if subject.whole[name] != value:
            continue
        if subject.changed(**{key: 2 * value, name: 2 * value}) in ("shapes", "rates"):
            return name
    return ""


def ratios_of(subject: Subject, dims: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of which the second must divide the first: a run with more of the second fails, and
    passes where the first follows, or with it what the first must divide."""
    found: list[tuple[str, str]] = []
    whole = subject.whole
    for small in sorted(dims, key=lambda key: whole[key]):
        step = math.lcm(*(whole[one] for large, one in found if large == small))
        for count in (whole[small] + step, whole[small] + 2 * step):  # some must be even
            if subject.changed(**{small: count}) != "fails":
                break
            large = divided_by(subject, small, count, dims)
            if large:
                found.append((large, small))
                break
    return found


def divided_by(subject: Subject, small: str, count: int, dims: Sequence[str]) -> str:
    """The size that runs with `count` of another one where it follows, or with it what it must
    divide; empty for none."""
    whole = subject.whole
    larger = [key for key in dims if whole[key] > whole[small]]
    divided = [key for key in larger if whole[key] % whole[small] == 0]
    tries: list[tuple[str, dict[str, int]]] = [(large, {}) for large in divided]
    others = ((large, key) for large in divided for key in larger if whole[key] > whole[large])
    tries += [(large, {key: whole[key] // whole[large]}) for large, key in others]
    for large, more in tries:
        each = count * (whole[large] // whole[small])
        runs = (
            {small: count, large: size, **{key: size * times for key, times in more.items()}}
            for size in (each, 6 * each)  # other numbers may divide it, too
        )
        if any(subject.changed(**one) != "fails" for one in runs):
            return large
    return ""


def unlike_of(
    subject: Subject, dims: Sequence[str], ratios: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Widths that must differ: where they are equal other code runs."""
    small = {small for _, small in ratios}
    wide = [key for key in dims if key not in small and subject.whole[key] >= 64]
    return [
        (one, other)
        for one, other in itertools.combinations(wide, 2)
        if subject.whole[one] != subject.whole[other]
        and subject.changed(**{one: subject.whole[other]}) == "code"
    ]


def lengths(subject: Subject, dims: Sequence[str]) -> None:
    """Sequences of other lengths must run the same code, at least up to some length; a head that
    does not is left out."""
    positions = subject.key("max_position_embeddings")
    if other := other_tables(dims, positions) if subject.stacks else []:
        raise refuse(subject.kind, f"`{other[0]}` counts positions, too")
    most = subject.whole[positions] - MOST if positions in dims else max(LENGTHS)
    for head, before in list(subject.before.items()):
        sounds = head == PAIR and hears(subject)  # of one length, whatever is said of them
        runs = [{"seq": length} for length in LENGTHS if length <= most and not sounds]
        if head == PAIR:
            runs += [{"target": length} for length in LENGTHS if length <= most]
        for run in runs:
            after = seen(subject.config(), head, **run)
            found = change(before, after)
            if found == "code" and "seq" in run and bounded(subject, head, run["seq"]):
                break
            if found in ("code", "fails"):
                why = after if isinstance(after, str) else "it runs other operations"
                subject.left_out[head] = f"{max(run.values())} tokens: {why}"
                del subject.before[head]
                break
    if not subject.before:
        raise refuse(subject.kind, next(iter(subject.left_out.values())))


def bounded(subject: Subject, head: str, other: int) -> bool:
    """Whether shorter sequences than this one run one code, up to a length that the captures do not
    reach; all heads have the same."""
    before = subject.before[head]

    def alike(length: int) -> bool:
        return change(before, seen(subject.config(), head, length)) in ("nothing", "shapes")

    most = max((one for one in LENGTHS if one < other), default=0)
    most += bisect_left(range(most + 1, other), True, key=lambda length: not alike(length))
    if most < LONGER or subject.longest not in (0, most):
        return False
    after = seen(subject.config(), head, most + 1)
    if isinstance(after, str):
        return False
    subject.longest, subject.beyond[head] = most, after
    return True


# ------------------------------------------------------------------------------------ other fields
def silent(subject: Subject, known: Iterable[str]) -> list[str]:
    """Fields of which other values change nothing."""
    asked = {}
    for key, value in subject.whole.items():
        if key in known or not noticed(key):
            continue
        if isinstance(value, bool):
            asked[key] = not value
        elif type(value) in (int, float):
            asked[key] = 2 * value + (1 if type(value) is int else 0.25)
    return sorted(quiet_of(subject, asked))


def quiet_of(subject: Subject, asked: Mapping[str, Any]) -> list[str]:
    """Those that change nothing: all at once, else by halves."""
    if not asked:
        return []
    if subject.changed(**asked) == "nothing":
        return list(asked)
    if len(asked) == 1:
        return []
    middle = len(asked) // 2
    items = list(asked.items())
    return [*quiet_of(subject, dict(items[:middle])), *quiet_of(subject, dict(items[middle:]))]


def absent(subject: Subject, known: Iterable[str]) -> list[str]:
    """Fields that are null or empty by default, and may bring code that was not captured."""
    return [
        key
        for key, value in subject.whole.items()
        if key not in known and noticed(key) and (value is None or value == {})
    ]


def fixed_of(subject: Subject, known: Iterable[str]) -> dict[str, Any]:
    """Lists and objects that the captured code was run with, and of other fields those that the
    capture leaves out of its assumptions by their names."""
    return {
        key: value
        for key, value in subject.whole.items()
        if key not in known
        and noticed(key)
        and value is not None
        and ((isinstance(value, (list, dict)) and value) or SILENT.fullmatch(key))
    }


def checkpoints(subject: Subject) -> bool:
    """Whether the class supports gradient checkpointing."""
    return all(one.supports_gradient_checkpointing for one in classes_of(subject))


def of_classes(subject: Subject) -> dict[str, list[str]]:
    """The linear layers that the class keeps in fp32 (`_keep_in_fp32_modules`), and bitsandbytes
    unquantized (transformers 5.23 quantizers/base.py get_modules_to_not_convert); classes whose
    name says less than that of a head's, and which do more."""
    found = classes_of(subject)
    kept = {name for one in found for name in one._keep_in_fp32_modules or ()}
    others = [name.removesuffix(PLAIN) for one in found if (name := one.__name__).endswith(PLAIN)]
    return {
        **({"casting": [f".{name}" for name in sorted(kept)]} if kept else {}),
        **({"others": others} if others else {}),
    }


def classes_of(subject: Subject) -> list[Any]:
    """The classes of transformers that the heads have."""
    import transformers

    names = {one.run.cls for one in subject.before.values()}
    return [getattr(transformers, name) for name in sorted(names)]


__all__ = ["Subject", "row_data"]
