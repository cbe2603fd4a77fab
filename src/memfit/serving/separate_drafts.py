"""Separate draft models of speculative decoding: a smaller model, EAGLE's or DFlash's layers.

A draft model is whole: embedding, layers, head, cache. EAGLE's has layers behind a projection of
the target's last hidden state and the next token's embedding, and takes the target's embedding and
head. EAGLE-3's projects three hidden states, its attention reads the embedding beside them, and it
has its own head over fewer tokens. DFlash's projects hidden states of several layers of the
target (vLLM 0.24.0 `model_executor/models/llama_eagle.py`, `llama_eagle3.py`, `qwen3_dflash.py`,
`v1/spec_decode/llm_base_proposer.py` _maybe_share_embeddings).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from memfit.errors import InputError, Problem, raise_errors
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.model.modules import Attention, Latent, Layer
from memfit.serving.base import Subject
from memfit.serving.stored import ONLINE, Scheme, scheme_of
from memfit.serving.weights import (
    Rank,
    attention_heads,
    kept_names,
    kv_heads,
    layer_sizes,
    rank_sizes,
    table_rows,
)

MODEL, EAGLE, EAGLE3, DFLASH = "draft_model", "eagle", "eagle3", "dflash"
KINDS = (MODEL, EAGLE, EAGLE3, DFLASH)
STATES = 3  # hidden states of the target that EAGLE-3 projects, unless the config says otherwise
TOKEN = 8  # bytes of a token's number in EAGLE-3's table of draft tokens


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A separate draft: what kind it is, its config, its layers, and how its weights are kept."""

    kind: str
    config: Mapping[str, Any]
    model: Model
    scheme: Scheme

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(self.model.layers)


def draft_name(options: Mapping[str, Any]) -> str:
    """The separate draft that an engine's options name; else nothing."""
    given = options.get("speculative_config")
    inner = given.get("model") if isinstance(given, Mapping) else None
    name = inner or options.get("speculative_draft_model_path") or options.get("draft") or ""
    return name if isinstance(name, str) else ""


def draft_option(options: Mapping[str, Any]) -> str:
    """The option that names the separate draft."""
    named = "speculative_config", "speculative_draft_model_path", "draft"
    return next(one for one in named if options.get(one))


def kind_of(method: str, subject: Subject) -> str:
    """The kind of a draft: as named, else as vLLM reads it from the name and the config
    (config/speculative.py __post_init__, 0.24.0)."""
    named = method.lower().replace("-", "_")
    if named in KINDS:
        return named
    classes = " ".join(map(str, subject.config.get("architectures") or ())).lower()
    name = f"{subject.name} {classes}".lower()
    if "dflash" in name:
        return DFLASH
    if "eagle3" in name:
        return EAGLE3
    return EAGLE if "eagle" in name else MODEL


def draft_of(
    method: str,
    name: str,
    subject: Subject | None,
    where: str,
    quantization: object = None,
    online: Mapping[str, Scheme] = ONLINE,
) -> Draft:
    """The draft as its config describes it, or an error that says what is missing; `quantization`
    quantizes a plain one while it is loaded."""
    if subject is None or subject.model is None:
        raise InputError.one(
            f"the draft model `{name[:80]}` of speculative decoding is not known",
            where=where,
            hint="name a folder with its config.json, or a model that memfit can read",
        )
    problems: list[Problem] = []
    scheme = scheme_of(subject.config, problems, method=quantization, online=online)
    raise_errors([replace(one, where=where) for one in problems])
    kind = kind_of(method, subject)
    return Draft(kind=kind, config=subject.config, model=subject.model, scheme=scheme)


def draft_problems(draft: Draft | None, where: str) -> list[Problem]:
    """A plain model as EAGLE's draft. EAGLE's have one layer, or a class with this name; engines
    would load a plain one without its embedding and head, or find no class for it."""
    if draft is None or draft.kind != EAGLE or len(draft.layers) == 1:
        return []
    if any("eagle" in str(one).lower() for one in draft.config.get("architectures") or ()):
        return []
    return [
        Problem(
            message=f"EAGLE's drafts have one layer, and this model has {len(draft.layers)}",
            where=where,
            hint="a smaller model that drafts alone is `draft_model` in vLLM, STANDALONE in SGLang",
        )
    ]


def sizes(draft: Draft, target: Model, rank: Rank) -> Iterator[int]:
    """Bytes of every tensor of the draft on one rank, which splits it as it splits the target."""
    check_heads(draft, rank)
    own = replace(
        rank,
        scheme=draft.scheme,
        layers=(0, len(draft.layers)),
        first=True,
        last=True,
        positions=min(rank.positions, draft.model.positions or rank.positions),
    )
    if draft.kind == MODEL:
        yield from rank_sizes(draft.model, own)
        return
    width = draft.model.width
    for index, layer in enumerate(draft.layers):
        kept = kept_names(layer, f"{draft.model.prefix}.{index}", draft.scheme)
        yield from layer_sizes(layer, own, kept)
        if draft.kind == EAGLE3 and index == 0:
            yield from wider_inputs(layer, own)
    yield from (width * rank.width,) * 2  # norms
    yield projected(draft, target) * width * rank.width
    if draft.kind == EAGLE3:
        tokens = natural(draft.config, "draft_vocab_size") or draft.model.vocab
        yield table_rows(tokens, rank, rank.tensor) * width * rank.width
        yield tokens * TOKEN
    if width != target.width:  # the target's embedding does not fit
        yield table_rows(draft.model.vocab, rank, rank.tensor) * width * rank.width


def copied(draft: Draft, target: Model, rank: Rank) -> int:
    """Bytes of an embedding and a head that SGLang makes for the draft and frees once it takes the
    target's (models/llama_eagle.py, llama_eagle3.py set_embed, 0.5.9)."""
    if draft.kind not in (EAGLE, EAGLE3) or draft.model.width != target.width:
        return 0
    tables = 2 if draft.kind == EAGLE and not draft.model.tied else 1
    return tables * table_rows(draft.model.vocab, rank, rank.tensor) * target.width * rank.width


def projected(draft: Draft, target: Model) -> int:
    """Values that the projection in front of the layers reads."""
    if draft.kind == EAGLE:
        return 2 * draft.model.width
    told = draft.config.get("dflash_config" if draft.kind == DFLASH else "eagle_config")
    inner = told if isinstance(told, Mapping) else {}
    key = "target_layer_ids" if draft.kind == DFLASH else "eagle_aux_hidden_state_layer_ids"
    ids = inner.get(key) or draft.config.get(key)
    count = len(ids) if isinstance(ids, list) and ids else 0
    if not count:
        count = len(draft.layers) if draft.kind == DFLASH else STATES
    return count * target.width


def wider_inputs(layer: Layer, rank: Rank) -> Iterator[int]:
    """EAGLE-3's first attention reads the embedding beside the hidden state."""
    for block in layer.blocks:
        mixer = block.mixer
        if isinstance(mixer, Attention):
            pairs = 2 * kv_heads(mixer.kv_heads, rank.heads)
            outputs = (mixer.heads // rank.heads + pairs) * mixer.head
            yield outputs * mixer.project[0].inputs * rank.width


def check_heads(draft: Draft, rank: Rank) -> None:
    heads = attention_heads(draft.model)
    if heads is not None and heads % rank.heads:
        raise InputError.one(
            f"the draft model's {heads} attention heads are not divisible by {rank.heads} tensor "
            "parallel ranks",
            where="tensor_parallel_size",
        )


def natural(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def token_values(draft: Draft, ranks: int) -> int:
    """Values of one token in the draft's cache on one of so many ranks."""
    found = 0
    for layer in draft.layers:
        for block in layer.blocks:
            mixer = block.mixer
            if isinstance(mixer, Attention):
                found += 2 * kv_heads(mixer.kv_heads, ranks) * mixer.head
            elif isinstance(mixer, Latent):
                found += mixer.cached
    return found
