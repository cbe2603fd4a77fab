"""An estimate in plain words, answered without click, which takes a third of its time to load.

Plain are `estimate`, the name of a model of the catalog, and options under their own names, each
once, with values that begin with no dash. Whatever else is typed is click's to read: other
spellings, job files, engines, layouts, help, and every mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OTHERS = ("model", "use")  # options that click reads otherwise
FORMS = {"--json": "as_json", "--explain": "explain", "--bytes": "exact", "--strict": "strict"}


def answered(words: Sequence[str]) -> tuple[int, str] | None:
    """The exit code and the answer; None where the words are not plain."""
    if not words or words[0] != "estimate":
        return None
    found = read(words[1:])
    if found is None:
        return None
    from memfit.cli.run import run_estimate

    return run_estimate(**found)


def read(words: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of `run_estimate`, with the values as text."""
    from memfit.model import catalog
    from memfit.model.spellings import is_quantized
    from memfit.spellings import value
    from memfit.words.options import options

    known = {name: one for name, one in options().items() if name not in OTHERS}
    found: dict[str, Any] = {"form": "text", **dict.fromkeys(FORMS.values(), False)}
    given: dict[str, Any] = {}
    rest = [part for word in words for part in parted(word)][::-1]
    while rest:
        word = rest.pop()
        name = word.removeprefix("--").replace("-", "_")
        if word in FORMS and not found[FORMS[word]]:
            found[FORMS[word]] = True
        elif not word.startswith("-"):
            if "words" in found or is_quantized(word) or ":" in word or catalog.find(word) is None:
                return None
            found["words"] = (word,)
        elif word != f"--{name}".replace("_", "-") or name not in known or name in given:
            return None
        elif known[name].type == "bool":
            given[name] = True
        elif not rest or rest[-1].startswith("-"):
            return None
        else:
            given[name] = value(name, rest.pop())
    return {**found, **given} if "words" in found else None


def parted(word: str) -> list[str]:
    """An option and the value behind its `=`; another word as it is."""
    return word.split("=", 1) if word.startswith("--") else [word]


__all__ = ["answered", "read"]
