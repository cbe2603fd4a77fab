"""`memfit new-family`: the row of a decoder from its config class in transformers. As for encoders,
every statement of the row is the outcome of a run on fake tensors with that field changed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from memfit.model.families._chains import CAUSAL
from memfit.trace.capture import Call
from memfit.trace.decoder_layers import Layers, layers_of
from memfit.trace.decoder_sizes import proposed
from memfit.trace.family_sizes import all_columns
from memfit.trace.graph_files import SILENT
from memfit.trace.new_family import (
    DECISIVE,
    Subject,
    absent,
    checkpoints,
    fixed_of,
    language_head,
    noticed,
    picky,
    quiet_of,
    ratios_of,
    refuse,
    sizes_of,
    subject_of,
    unlike_of,
)
from memfit.trace.probes import SEQ, Seen, seen
from memfit.trace.program import configuration

HEAD_SIZE = 64
LEAST_WORDS = 544  # of the models that are captured
SOFTCAP = re.compile(r"(final_)?logits?_soft_?cap(ping)?")
BEYOND = 4096  # a window that cuts no sequence
KV = "num_key_value_heads"
WINDOW = re.compile(r".*window.*|.*chunk_size")
ACTIVE = re.compile(r".*(per_tok(en)?|top_?k|topk_experts|moe_k)")
EXPERTS = re.compile(r"(n|num|moe_num)_(local_|routed_)?experts|moe_n_experts")
KERNEL = re.compile(r".*kernel.*|.*conv_l_cache|.*d_conv", re.IGNORECASE)  # added to a length
ROPES: tuple[Mapping[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
)
ORIGINAL = {"original_max_position_embeddings": 4096}


def decoder_data(
    kind: str, given: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], Iterator[dict[str, tuple[int, ...]]]]:
    """The row of a type of decoders as data, and further sizes that it can be captured with."""
    given = given or {}
    subject, layers = decoder(kind, given)
    count = subject.key("num_hidden_layers")
    dims, equal, fixed = sizes_of(subject, count, (), following=False)
    positions = subject.key("max_position_embeddings")
    if positions in dims:
        raise refuse(kind, f"it has a table of `{positions}` positions")
    ratios = ratios_of(subject, dims)
    split = subject.key("hidden_size"), subject.key("num_attention_heads")
    if not has_head_size(dims) and set(split) <= set(dims) and split not in ratios:
        ratios.append(split)
    kept = [key for key in dims if "head_dim" in key or not picky(subject, key, dims, ratios)]
    kept = [key for key in kept if not KERNEL.fullmatch(key)]
    plain, dims = [key for key in dims if key not in kept], kept
    fixed += [key for key, name in equal.items() if name not in dims]
    equal = {key: name for key, name in equal.items() if name in dims}
    subject.equal = equal
    caps = caps_of(subject, {count, positions, *layers.lists, *dims, *equal, *fixed})
    dims += caps
    known = {count, positions, layers.first, *layers.lists, *dims, *equal, *fixed}
    window = window_of(subject, known)
    if window:
        subject.base[window] = BEYOND
    quiet = silent(subject, {*known, window})
    more = all_columns(subject, dims, ratios, equal, partial(proposed, caps=caps))
    sizes = next(more)
    experts = experts_of(subject, {*known, *plain} - {*caps})
    rope = subject.whole.get("rope_parameters")
    usual = {name: key for key, name in subject.names.items()}
    named = {usual.get(key, key): key for key in dims}
    back = {key: name for name, key in named.items()}
    follows = follows_of(subject, dims, layers)
    if lone := [name for names in follows.values() for name in names if name not in back]:
        raise refuse(kind, f"a size follows from `{lone[0]}`, which cannot vary alone")
    widths = [key for key in dims if "head_dim" not in key]  # wide heads run other kernels
    held = {count, positions, "rope_parameters", layers.first, window, *layers.lists, *dims, *equal}
    read = (*quiet, window, layers.first)  # by the row, or by nothing
    logits = logits_of(subject)
    bound = logits["softcap"]
    row = {
        "type": kind,
        "decoder": True,
        "layers": count,
        "kinds": layers.data(),
        "dims": named,
        "ratios": [[back[large], back[small]] for large, small in ratios],
        "follows": {key: [back[one] for one in names] for key, names in follows.items()},
        "equal": {key: back[name] for key, name in equal.items()},
        "unlike": [
            *([back[one], back[other]] for one, other in unlike_of(subject, widths, ratios)),
            *([back[one], sum_of(back, some)] for one, *some in unlike_sums(subject, dims)),
        ],
        **({"caps": [back[one] for one in caps]} if caps else {}),
        "sums": sums_of(subject, back),
        **({"least": least} if (least := least_of(subject, dims, back)) else {}),
        "fixed": fixed_of(subject, {*held, *quiet}),
        "ropes": ropes_of(subject) if rope else [],
        "base": subject.base,
        "sizes": {key: list(values) for key, values in sizes.items()},
        "experts": experts,
        "silent": [*(key for key in read if key and not SILENT.fullmatch(key)), *equal],
        "absent": absent(subject, held),
        "window": window,
        "positions": positions,
        "tied": bool(subject.plain.get("tie_word_embeddings", False)),
        **logits,
        "packs": True,
        **({} if checkpoints(subject) else {"checkpoints": False}),
        **({} if subject.head == CAUSAL else {"heads": [subject.head]}),
        "label_heads": [],
        "given": dict(given),
        "defaults": defaults_of(
            subject,
            (*dims, *experts, positions, window, layers.first, bound, *rates_of(subject), *given),
            {*follows, *layers.lists},  # defaults of lists go by the number of layers
        ),
    }
    return row, more


def defaults_of(subject: Subject, keys: Iterable[str], left: Collection[str]) -> dict[str, Any]:
    """What the class puts in place of fields that configs leave out."""
    decisive = {*map(subject.key, DECISIVE), *left}
    return {
        key: subject.plain[key]
        for key in dict.fromkeys(keys)
        if key not in decisive and subject.plain.get(key) is not None
    }


def decoder(kind: str, given: Mapping[str, Any]) -> tuple[Subject, Layers]:
    """The class's defaults with few layers of every kind, no dropout, and fewer keys than
    queries where it runs so."""
    subject = subject_of(kind, given)
    subject.head = language_head(configuration(subject.whole, None))
    count = subject.key("num_hidden_layers")
    if not isinstance(subject.whole.get(count), int):
        raise refuse(kind, f"its config has no integer `{count}`")
    base = {**given, "tie_word_embeddings": False}
    padding = subject.whole.get("pad_token_id")
    if type(padding) is int and padding >= LEAST_WORDS:
        base["pad_token_id"] = 0
    base |= {key: type(subject.whole[key])(0) for key in rates_of(subject)}
    layers = layers_of(subject, base)
    base |= layers.base
    run = seen({"model_type": kind, **base}, subject.head)
    for changes in smaller(subject):
        after = seen({"model_type": kind, **base, **changes}, subject.head)
        if not isinstance(after, str) and (isinstance(run, str) or unlike_weights(run, after)):
            base |= changes
            run = after
    if isinstance(run, str):
        raise refuse(kind, run)
    heads, kv = subject.key("num_attention_heads"), subject.key(KV)
    same = kv not in base and kv in subject.whole and subject.whole[kv] == subject.whole.get(heads)
    found = replace(
        subject,
        whole={**subject.whole, **base},
        base=base,
        equal={kv: heads} if same else {},
    )
    found.before[found.head] = run
    return found, layers


def unlike_weights(before: Seen, after: Seen) -> bool:
    """Latent attention has as many keys as queries, whatever a config says."""
    return before.shapes[1] != after.shapes[1]


def has_head_size(dims: Sequence[str]) -> bool:
    """Whether a size of a head is given, and does not follow from the width."""
    return any("head_dim" in key for key in dims)


def smaller(subject: Subject) -> Iterator[dict[str, int]]:
    """Heads that three times as wide run the same kernels, and fewer keys than queries."""
    whole = subject.whole
    heads, kv = whole.get(subject.key("num_attention_heads")), whole.get(subject.key(KV))
    for key, value in whole.items():
        if key == "head_dim" and type(value) is int and value > HEAD_SIZE:
            yield {key: HEAD_SIZE}
    if type(heads) is int:
        yield {subject.key("hidden_size"): HEAD_SIZE * heads}
        if heads == kv and heads % 4 == 0:
            yield {subject.key(KV): heads // 4}


def rates_of(subject: Subject) -> list[str]:
    """Fields of dropout, which is left out."""
    return [
        key
        for key, value in subject.plain.items()
        if "drop" in key and type(value) in (int, float) and noticed(key)
    ]


def window_of(subject: Subject, known: Iterable[str]) -> str:
    """The field that cuts what tokens see, where it is less than the sequence; empty for none."""
    for key, value in subject.whole.items():
        if key in known or type(value) is not int or not WINDOW.fullmatch(key):
            continue
        wide = subject.changed(**{key: 64 * SEQ}) in ("nothing", "fails")
        if value > SEQ and wide and subject.changed(**{key: SEQ // 2}) == "code":
            return key
    return ""


def caps_of(subject: Subject, known: Iterable[str]) -> list[str]:
    """Fields that give the size of something where the sequence has more tokens than that."""
    return [
        key
        for key, value in subject.whole.items()
        if key not in known
        and type(value) is int
        and value > SEQ
        and noticed(key)
        and subject.changed(**{key: SEQ // 2}) == "shapes"
        and subject.changed(**{key: SEQ // 2 + 3}) == "shapes"
        and subject.changed(**{key: 64 * SEQ}) == "nothing"
    ]


def silent(subject: Subject, known: Iterable[str]) -> list[str]:
    """Fields of which neither larger nor smaller values change anything."""
    asked: list[dict[str, Any]] = [{}, {}]
    for key, value in subject.whole.items():
        if key in known or not noticed(key):
            continue
        if isinstance(value, bool):
            asked[0][key] = asked[1][key] = not value
        elif type(value) is int:
            asked[0][key], asked[1][key] = 2 * value + 1, min(8, value // 2)
        elif type(value) is float:
            asked[0][key], asked[1][key] = 2 * value + 0.25, value / 4
        elif isinstance(value, str) and key.endswith("_act"):  # some classes have their own
            asked[0][key], asked[1][key] = "gelu", "relu"
    large = quiet_of(subject, asked[0])
    return sorted(quiet_of(subject, {key: asked[1][key] for key in large}))


def ropes_of(subject: Subject) -> list[str]:
    """The kinds of rotary positions that run the same operations."""
    rope = subject.whole["rope_parameters"]
    nested = [key for key, one in rope.items() if isinstance(one, dict)]
    own = {one["rope_type"] for one in (map(rope.get, nested) if nested else [rope])}
    for more in ROPES:
        changed = {
            **rope,
            **({key: {**rope[key], **more, **ORIGINAL} for key in nested} or {**more, **ORIGINAL}),
        }
        if subject.changed(rope_parameters=changed) == "nothing":
            own.add(more["rope_type"])
    return sorted(own)


def follows_of(subject: Subject, dims: Sequence[str], layers: Layers) -> dict[str, tuple[str, ...]]:
    """Sizes that the class derives from others where they are not given: from one, or as the
    quotient of two."""
    width, heads = subject.key("hidden_size"), subject.key("num_attention_heads")
    plain = {"model_type": subject.kind, **layers.base}
    found: dict[str, tuple[str, ...]] = {}

    def default(**changes: Any) -> dict[str, Any]:
        whole: dict[str, Any] = configuration({**plain, **changes}, None).to_dict()
        return {key: value for key, value in whole.items() if type(value) is int}

    before = default()
    for key in dims:
        if key in map(subject.key, DECISIVE):
            continue
        for names in ((heads,), (width,), (width, heads)):
            known = [before[one] for one in names if one in before]
            if len(known) < len(names) or key in names or key not in before:
                continue
            value = known[0] if len(names) == 1 else known[0] // known[1]
            more = default(**{names[0]: 4 * known[0]})
            if before[key] == value and more.get(key) == 4 * value:
                found[key] = names
                break
    return found


def least_of(subject: Subject, dims: Sequence[str], back: Mapping[str, str]) -> list[list[str]]:
    """Pairs of sizes of heads, of which the first must not be less than the second."""
    sizes = [key for key in dims if "head_dim" in key]
    found = []
    for large, small in itertools.permutations(sizes, 2):
        most, more = subject.whole[large], subject.whole[large] + 8
        if most < subject.whole[small] or subject.changed(**{small: more}) != "fails":
            continue
        if subject.changed(**{small: more, large: 2 * most}) != "fails":
            found.append([back[large], back[small]])
    return found


def unlike_sums(subject: Subject, dims: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Sizes of heads, of which the first must not be the sum of two others: other code runs."""
    sizes = [key for key in dims if "head_dim" in key]
    for one in sizes:
        for first, second in itertools.combinations([key for key in sizes if key != one], 2):
            equal = subject.whole[first] + subject.whole[second]
            if subject.changed(**{one: equal}) == "code":
                yield one, first, second


def sums_of(subject: Subject, back: Mapping[str, str]) -> dict[str, list[str]]:
    """Numbers of the config that are the sum of two sizes of heads."""
    sizes = [key for key in back if "head_dim" in key]
    found: dict[str, list[str]] = {}
    for key, value in subject.whole.items():
        if type(value) is not int or "head_dim" not in key or key in back:
            continue
        for one, other in itertools.combinations(sizes, 2):
            more = configuration(subject.config(**{one: subject.whole[one] + 8}), None).to_dict()
            if value == subject.whole[one] + subject.whole[other] and more.get(key) == value + 8:
                found[key] = [back[one], back[other]]
    return found


def sum_of(back: Mapping[str, str], keys: Sequence[str]) -> str:
    """As sizes are written."""
    return " + ".join(back[key] for key in keys)


def logits_of(subject: Subject) -> dict[str, Any]:
    """What is done to logits before the loss: they are multiplied by a number, or bounded by that
    of a field."""
    run = subject.before[subject.head].run
    calls = [one for one in run.log if isinstance(one, Call)]
    last = max(
        place for place, one in enumerate(calls) if (one.name, one.where) == ("linear", run.head)
    )
    names = [one.name.partition(".")[0] for one in calls[last + 1 : last + 4] if not one.where]
    bounds = [key for key, one in subject.whole.items() if SOFTCAP.fullmatch(key) and one]
    tanh = "aten::tanh" in names
    if tanh and len(bounds) != 1:
        raise refuse(subject.kind, "no field is known to bound its logits")
    scaled = not tanh and bool({"aten::mul", "aten::div"} & set(names[:1]))
    return {"scaled": scaled, "softcap": bounds[0] if tanh else ""}


def experts_of(subject: Subject, known: Iterable[str]) -> list[str]:
    """The fields that count the experts that run, and all; none where there are none."""
    run = subject.before[subject.head].run
    if not any("xpert" in one.module and len(one.shape) == 3 for one in run.weights):
        return []
    active = [key for key in known if ACTIVE.fullmatch(key)]
    active = active or [key for key in subject.whole if ACTIVE.fullmatch(key)]  # one, always
    experts = [key for key in known if EXPERTS.fullmatch(key)]
    if len(active) != 1 or len(experts) != 1:
        raise refuse(subject.kind, "no field is known to count its experts")
    return [*active, *experts]


__all__ = ["decoder_data"]
