"""What a family's name or a bare size means: `qwen3`, `phi 3`, `mistral`, `70b`."""

from __future__ import annotations

import re
from itertools import pairwise

from memfit.model import catalog
from memfit.model.spellings import ENDINGS

MOST = 16  # models of one family that are looked at
# Words of a name that make another form of a model which the family has, too.
VARIANTS = re.compile(
    r"-2507|coder|fp8|awq|gptq|embedding|reranker|nvfp4|int4|int8|bnb", re.IGNORECASE
)
BASE = re.compile(r"-base(?:-\d+k)?$", re.IGNORECASE)  # before it was trained for chats, or a size
SIZE = re.compile(r"\d+(?:\.\d+)?[bm]")
# Models whose weights nobody can download.
CLOSED = re.compile(
    r"(?:chat-?gpt|gpt-?(?:3\.5|4|5)|claude|gemini)(?:[-_ .]?[\w.]+)*", re.IGNORECASE
)


def models_of(name: str) -> tuple[str, ...]:
    """The catalog's models of a family or of a size, smallest first, each in one form; none for the
    name of one model."""
    if not name.strip() or "/" in name or catalog.find(name):
        return ()
    found = begun(name.strip().lower())
    counts = {one.name: one.parameters or one.published or 0 for one in catalog.entries()}
    bases = [one for one in found if BASE.search(one)]
    sizes = {counts[one] for one in found if one not in bases}
    usual = [
        one
        for one in found
        if not VARIANTS.search(one.rpartition("/")[2])
        and (one not in bases or counts[one] not in sizes)
    ]
    some = usual if len(usual) > 1 else found
    single: dict[tuple[str, int], str] = {}
    for one in sorted(some, key=len):
        single.setdefault((without_ending(plain(one)), counts[one]), one)
    ordered = sorted(single.values(), key=lambda one: (counts[one], -len(one), one))
    return tuple(thinned(ordered, counts))


def begun(word: str) -> list[str]:
    """The models whose names begin with a word, or that have a size; else all with that word."""
    names = catalog.names()
    if SIZE.fullmatch(word):
        size = re.compile(rf"(?:^|-|(?<=[a-z])_){re.escape(word)}(?:-|$)")
        return [one for one in names if size.search(one.rpartition("/")[2].lower())]
    family, _, last = re.sub(r"[-_\s]+", " ", word).rpartition(" ")
    if family and SIZE.fullmatch(last) and (some := set(begun(last)) & set(begun(family))):
        return [one for one in names if one in some]
    parts = re.findall(r"[a-z]+|\d+(?:\.\d+)*", word)
    if not parts:
        return []
    start = "-?".join(map(re.escape, parts))
    same = r"(?!\.?\d)" if parts[-1][0].isdigit() else r"(?![a-z])"  # `qwen3` is not Qwen3.5
    inside = catalog.candidates(word)
    for pattern in (start + same, start):
        found = [one for one in names if re.match(pattern, plain(one))]
        if len(found) > 1 or (found and len(inside) < 2):
            return found
    return inside


def thinned(names: list[str], counts: dict[str, int]) -> list[str]:
    """At most `MOST`: of two that are nearly of one size, the one with the shorter name stays."""
    kept = list(names)
    while len(kept) > MOST:
        one, other = min(pairwise(kept), key=lambda pair: counts[pair[1]] / max(1, counts[pair[0]]))
        kept.remove(max(one, other, key=len))
    return kept


def plain(name: str) -> str:
    """A model's name without its owner, in one spelling."""
    owner, _, short = name.lower().rpartition("/")
    dotted = re.sub(r"(?<=\d)_(?=\d)", ".", short)  # `Llama-3_3`
    return dotted.replace("_", "-").removeprefix("meta-").removeprefix(f"{owner}-")


def without_ending(name: str) -> str:
    """A name without what says how a model of this size was trained."""
    bare = name
    for ending in ENDINGS:
        bare = bare.replace(ending, "")
    return bare


def is_closed(name: str) -> bool:
    """Whether these are the words of a model that is not public."""
    return CLOSED.fullmatch(name.strip()) is not None
