"""From what a user names to a model as llama.cpp sees it: a GGUF file, or a config and a
quantization."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memfit.errors import InputError, Problem, SourceError, raise_errors
from memfit.model.sources.files import shown
from memfit.model.sources.gguf import Gguf, read_file
from memfit.serving.llamacpp.caches import attends, recurrent
from memfit.serving.llamacpp.model import LOCK, Fact, GgufModel, GgufTensor
from memfit.serving.llamacpp.quantize import ALIASES, BASES, TYPES
from memfit.serving.llamacpp.recipes import RECIPES

KEPT = 4  # models of the last questions
RECENT: dict[tuple[str, str, str], GgufModel] = {}
MOST_LAYERS = 1024  # LLAMA_MAX_LAYERS is 512; files with more are not served
MOST_HEADS = 2**14
COUNTS = (
    "attention.head_count",
    "attention.head_count_kv",
    "expert_count",
    "expert_used_count",
    "ssm.state_size",
    "ssm.inner_size",
    "ssm.group_count",
)


def from_file(path: Path) -> GgufModel:
    """A file, or all parts of a split one."""
    return from_gguf(read_file(path), path.name)


def from_gguf(file: Gguf, name: str) -> GgufModel:
    """The metadata of its architecture and its tensors, checked before anything is counted."""
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise SourceError.one(
            f"`{file.where}` does not name its `general.architecture`", where="model"
        )
    if arch == "clip" or file.metadata.get("general.type", "model") != "model":
        raise SourceError.one(
            f"`{file.where}` is not a complete model",
            where="model",
            hint="name the model's own file; a vision tower goes with `--mmproj`",
        )
    prefix = f"{arch}."
    facts: dict[str, Fact] = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    tensors = tuple(
        GgufTensor(name=tensor.name, sizes=tuple(reversed(tensor.shape)), type=TYPES[tensor.format])
        for tensor in file.tensors
    )
    title = file.metadata.get("general.name")
    model = GgufModel(
        name=str(title) if isinstance(title, str) and title.isprintable() else name,
        arch=arch,
        facts=facts,
        tensors=tensors,
        origin=file.where,
    )
    check(model, file.where)
    return model


def check(model: GgufModel, where: str) -> None:
    """Numbers that lie: each would make a wrong answer, so each is named."""
    problems: list[Problem] = []

    def wrong(message: str) -> None:
        problems.append(Problem(message=message, where=where))

    if model.arch not in RECIPES:
        wrong(f"the graph of GGUF architecture `{shown(model.arch)}` is not supported yet")
        raise_errors(problems, SourceError)
    for key, most in (
        ("block_count", MOST_LAYERS),
        ("embedding_length", 2**20),
        ("context_length", 2**31),
    ):
        value = model.facts.get(key)
        if type(value) is not int or not 1 <= value <= most:
            wrong(
                f"`{model.arch}.{key}` must be an integer from 1 to {most}, not `{str(value)[:40]}`"
            )
    for key in COUNTS:
        value = model.facts.get(key, 0)
        values = value if isinstance(value, tuple) else (value,)
        if not all(type(one) is int and 0 <= one <= MOST_HEADS * 16 for one in values):
            wrong(f"`{model.arch}.{key}` must be an integer up to {MOST_HEADS}")
    table = model.by_name.get("token_embd.weight")
    if table is None or len(table.sizes) != 2:
        wrong("has no matrix `token_embd.weight`, so it holds no model")
    elif not problems and table.sizes[0] != model.width:
        wrong(
            f"`token_embd.weight` is {table.sizes[0]} wide and "
            f"`{model.arch}.embedding_length` says {model.width}"
        )
    beyond = [one.name for one in model.tensors if one.layer >= model.number("block_count")]
    if not problems and beyond:
        wrong(f"`{beyond[0]}` lies beyond the layers that `{model.arch}.block_count` says")
    norms = ("output_norm.weight", "token_embd_norm.weight", "dec.output_norm.weight")
    normed = any(one in model.by_name for one in norms)
    if not problems and not normed and model.arch != "olmo":
        wrong("the file has no `output_norm.weight`")
    if not problems:
        for message in inconsistent(model):
            wrong(message)
    if not problems:
        present = {tensor.layer for tensor in model.tensors}
        layers = [one for one in range(model.layers) if not skipped(model, one)]
        missing = [one for one in layers if one not in present]
        if missing:
            wrong(
                f"`{model.arch}.block_count` says {model.number('block_count')} layers, and "
                f"{len(missing)} of them have no tensors (the first: {missing[0]})"
            )
    raise_errors(problems, SourceError)


def skipped(model: GgufModel, layer: int) -> bool:
    """Nemotron Ultra has layers that do nothing (src/models/deci.cpp)."""
    inner = model.number("feed_forward_length", layer=layer)
    return model.arch == "deci" and not model.heads(layer) and not inner


def inconsistent(model: GgufModel) -> Iterator[str]:
    """Numbers that contradict each other or the tensors."""
    routed = [tensor for tensor in model.tensors if tensor.name.endswith("ffn_gate_inp.weight")]
    active, count = model.number("expert_used_count"), model.number("expert_count")
    if routed and not 1 <= active <= routed[0].sizes[-1]:
        yield f"`expert_used_count` is {active}, and there are {count} experts"
    groups = model.number("expert_group_count")
    if groups > 1 and (count % groups or model.number("expert_group_used_count") > groups):
        yield f"`expert_group_count` {groups} does not divide {count} experts"
    for layer in range(model.layers):
        heads, kv_heads = model.heads(layer), model.kv_heads(layer)
        if attends(model, layer) and (not heads or not kv_heads or heads % kv_heads):
            yield f"layer {layer} has {heads} heads and {kv_heads} key/value heads"
            return
        query = model.by_name.get(f"blk.{layer}.attn_q.weight")
        if query is not None and len(query.sizes) == 2 and heads and query.sizes[1] % heads:
            yield f"`{query.name}` has {query.sizes[1]} rows, which {heads} heads do not share"
            return
    indexed = [one for one in model.tensors if one.name.endswith("indexer.attn_q_b.weight")]
    each = model.number("attention.indexer.key_length")
    if indexed and indexed[0].sizes[-1] != each * model.number("attention.indexer.head_count"):
        yield f"`{indexed[0].name}` is not for the heads that `attention.indexer` says"
    inner, state = model.number("ssm.inner_size"), model.number("ssm.time_step_rank")
    if any(recurrent(model, layer) for layer in range(model.layers)):
        if "shortconv.l_cache" in model.facts:
            return
        if not inner or not state or not model.number("ssm.conv_kernel"):
            yield "a recurrent layer has no `ssm` sizes"


_TAGGED = re.compile(r"(.+?)[:@]([A-Za-z0-9_.-]+)$")
_REPO_ENDS = re.compile(r"(-(i1-)?GGUF|-MTP-GGUF)$", re.IGNORECASE)


def tag(spec: str) -> tuple[str, str]:
    """`REPO:QUANT` apart; the quantization is empty where there is none of that name."""
    match = _TAGGED.match(spec)
    if match is None or "://" in spec:
        return spec, ""
    name = match[2].upper().replace("-", "_").removesuffix(".GGUF")
    name = name.removeprefix("UD_")
    known = name in BASES or name in ALIASES or name.endswith("_XL")
    return (match[1], match[2]) if known else (spec, "")


def repository(name: str) -> str:
    """A repository of GGUF files named after the model that it was made of."""
    return _REPO_ENDS.sub("", name)


def from_config(config: Mapping[str, Any], name: str, quantization: str) -> GgufModel:
    """The model that a config and a quantization mean; those of the last questions are kept, with
    what they have found out for themselves."""
    from memfit.serving.llamacpp.convert import converted

    key = name, quantization, repr(config)
    known = RECENT.get(key)
    if known is None:
        known = converted(config, name, quantization)
        with LOCK:
            while len(RECENT) >= KEPT:
                del RECENT[next(iter(RECENT))]
            RECENT[key] = known
    return known


__all__ = ["InputError", "check", "from_config", "from_file", "from_gguf", "repository", "tag"]
