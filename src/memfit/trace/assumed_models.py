"""Models that nothing is known of but their name: the sizes of a public model that it is called
after, or of one with as many parameters."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from memfit.trace import failures, public_configs

SIZE = re.compile(r"(?:\d+x)?(\d+(?:\.\d+)?)([bm])")
# What names add to that of the model that was tuned.
ADDED = {"meta", "hf", "instruct", "chat", "it", "base", "sft", "dpo", "deduped", "beta", "alpha"}
VERSION = re.compile(r"v\d+(?:\.\d+)*|\d{4}")
# Of these a size says nothing: no models of texts, experts, adapters, or weights in few bits.
OTHER = re.compile(
    r"vl|vlm|vision|vit|clip|siglip|whisper|wav2vec\d*|audio|speech|tts|diffusion|embed\w*|rerank\w*"
    r"|llava|moe|\d+x\d+b|a\d+b|awq|gptq|gguf|exl2|fp8|nvfp4|mxfp4|int[48]|[48]bits?|bnb|lora"
)
CACHED = "models--"  # folders of huggingface_hub's cache
NEAR = 1.15  # times as many parameters
PLAIN = "llama"  # the family of the commonest design, and what its models are called


def words(name: str) -> list[str]:
    """`acme/Llama-3-8B_med` is llama, 3, 8b and med."""
    return [one for one in re.split(r"[-_ ]", name.rpartition("/")[2].lower()) if one]


def published(path: str) -> str:
    """What a model is called on the hub, by the folder that it was downloaded to: there
    `Qwen/Qwen3-8B` of `~/models/Qwen/Qwen3-8B`, `models--Qwen--Qwen3-8B/snapshots/1a2b` in
    huggingface_hub's cache, and `___` for a dot in ModelScope's."""
    from memfit.model import catalog

    if not failures.is_path(path):
        return path
    steps = [one for one in path.replace("___", ".").split("/") if one]
    cached = next((one for one in steps if one.startswith(CACHED)), "")
    if cached:
        return cached.removeprefix(CACHED).replace("--", "/", 1)
    both = "/".join(steps[-2:])
    known = catalog.find(both) or both.lower() in public_configs.table()["models"]
    return both if known else "".join(steps[-1:])


def parts(name: str) -> tuple[str, str]:
    """What a name calls the model, without what tuning added, and its size."""
    found = words(name)
    size = next((one for one in found if SIZE.fullmatch(one)), "")
    called = [one for one in found if one not in ADDED and not VERSION.fullmatch(one)]
    return "".join(one for one in called if one != size), size


def parameters(size: str) -> float:
    found = SIZE.fullmatch(size)
    if found is None:
        return 0.0
    return float(found[1]) * (1e9 if found[2] == "b" else 1e6)


@functools.cache
def public() -> tuple[tuple[str, str, str], ...]:
    """Name, what it is called and size of each public model with a size in its name."""
    from memfit.model import catalog

    rows = (
        (name, *parts(name)) for name in sorted(catalog.names(), key=lambda one: (len(one), one))
    )
    return tuple(one for one in rows if one[1] and one[2])


def called_after(name: str) -> str | None:
    """The public model of the same size whose name is the longest part of this one."""
    called, size = parts(name)
    found = [
        one for one in public() if one[2] == size and one[1] in called and not other(name, one[0])
    ]
    return max(found, key=lambda one: len(one[1]))[0] if size and found else None


@functools.cache
def bases() -> tuple[tuple[str, Callable[[], Any]], ...]:
    """What public models are called behind their owners, longest first, and their configs; a name
    of one word says too little."""
    from memfit.model import catalog

    listed = {name.lower(): catalog.entry(name).config for name in catalog.names()}
    listed |= {name: lambda one=one: one for name, one in public_configs.table()["models"].items()}
    bare = {name.rpartition("/")[2]: config for name, config in listed.items()}
    bare |= {re.sub("-(un)?cased$", "", name): config for name, config in bare.items()}
    found = {name: config for name, config in bare.items() if len(words(name)) > 1}
    return tuple(sorted(found.items(), key=lambda one: -len(one[0])))


def tuned_from(name: str) -> tuple[str, dict[str, Any]] | None:
    """The public model whose name is a part of this one, as in `acme/my-roberta-base-reviews`."""
    whole = f"-{'-'.join(words(name))}-"
    for known, config in bases():
        if f"-{'-'.join(words(known))}-" in whole and not other(name, known):
            return known, dict(config())
    return None


def other(name: str, known: str = "") -> bool:
    """Whether a name says more of the kind of model than the known one's."""
    return any(OTHER.fullmatch(one) for one in words(name) if one not in words(known))


def as_large(name: str) -> str | None:
    """A plain decoder with about as many parameters as the name says; of several that with most
    words, whose logits are largest."""
    wanted = parameters(parts(name)[1])
    if not wanted or other(name):
        return None
    near = [
        (-vocabulary, max(has / wanted, wanted / has), len(one), one)
        for one, has, vocabulary in plain()
    ]
    return min((one for one in near if one[1] <= NEAR), default=(None,))[-1]


def plain() -> Iterator[tuple[str, float, int]]:
    """Name, parameters and words."""
    from memfit.model import catalog

    for name, called, size in public():
        if called.startswith(PLAIN):
            config = catalog.entry(name).config()
            if config.get("model_type") == PLAIN:
                yield name, parameters(size), int(config["vocab_size"])


def find(name: str) -> tuple[dict[str, Any], str] | None:
    """The config of the public model, and what to say of it."""
    from memfit.model import catalog

    known, said = called_after(name), "by its name it is assumed to have the sizes of"
    base = tuned_from(name) if known is None else None
    if base is not None:
        return base[1], f"`{name}` was not found: {said} `{base[0]}`"
    message = f"`{name}` was not found: {said} `{known}`"
    if known is None:
        known = as_large(name)
        message = (
            f"`{name}` was not found, and no public model has that name: it is assumed to have the "
            f"sizes of `{known}`, a plain decoder as large as its name says"
        )
    return None if known is None else (dict(catalog.entry(known).config()), message)


__all__ = ["find", "published"]
