"""Speculative decoding as `speculative_config` has it: the draft, and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.errors import InputError, Problem
from memfit.model.modules import Layer
from memfit.serving.base import Question
from memfit.serving.drafts import draft_layers
from memfit.serving.separate_drafts import KINDS, MODEL, Draft, draft_name, draft_of
from memfit.serving.subject import known_model
from memfit.serving.vllm.images import NO_OBJECT, is_integer
from memfit.serving.vllm.rules import Rules
from memfit.serving.weights import attention_heads

MOST_GUESSES = 1024  # that memfit reads; published commands have 1 to 15
CACHING = "enable_prefix_caching"
MODEL_FREE = ("ngram", "ngram_gpu", "suffix")  # guesses from the text itself


def guesses_of(options: Mapping[str, Any]) -> int:
    """Tokens that a draft guesses ahead."""
    words = options.get("speculative_config") or {}
    return int(words.get("num_speculative_tokens") or bool(words))


# Whose cached prefixes keep the state of each block (SupportsMambaPrefixCaching in model_executor/
# models, 0.16.0 to 0.24.0; models/config.py MambaModelConfig), by `model_type`.
EVERY_STATE = (
    "mamba",
    "bamba",
    "falcon_mamba",
    "mamba2",
    "jamba",
    "granitemoehybrid",
    "nemotron_h",
)


def cached_states(question: Question, rules: Rules) -> bool:
    """Whether a cached prefix keeps states. Prefixes of hybrid models are cached by default from
    0.26 on, those of models without attention are not (config/model.py
    is_prefix_caching_supported)."""
    mode, given = (question.options.get(one) for one in ("mamba_cache_mode", CACHING))
    if given is None:
        model = known_model(question.subject, compressed=True, encoders=True, speech=True)
        given = rules.hybrid_prefixes and attention_heads(model) is not None
    return bool(given) and mode != "none" and rules.aligned_states


def every_state(question: Question, rules: Rules) -> bool:
    """Whether a cached prefix keeps the state of each block, not of the last one alone."""
    kind, mode = question.subject.config.get("model_type"), question.options.get("mamba_cache_mode")
    every = kind in EVERY_STATE if mode is None else mode == "all"
    return cached_states(question, rules) and every


def state_pages(question: Question, rules: Rules) -> int:
    """Pages of a state beside those of each block: one, one more for each guessed token, and where
    prefixes are cached (kv_cache_interface.py MambaSpec, 0.16 on)."""
    last = 0 if every_state(question, rules) else 1 + cached_states(question, rules)
    return last + guesses_of(question.options)


def draft_problems(options: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with `speculative_config`."""
    given, where = options.get("speculative_config"), "speculative_config"
    hint = 'like `{"method": "mtp", "num_speculative_tokens": 2}`'
    if given is None:
        return []
    if not isinstance(given, Mapping):
        return [Problem(message=NO_OBJECT.format(where), where=where, hint=hint)]
    tokens, method, model = (
        given.get(key) for key in ("num_speculative_tokens", "method", "model")
    )
    found = []
    if tokens is not None and not is_integer(tokens, 1, MOST_GUESSES):
        what = f"must be an integer from 1 to {MOST_GUESSES}"
        found.append(f"`num_speculative_tokens: {str(tokens)[:40]}` {what}")
    if method is not None and not isinstance(method, str):
        found.append(f"`method: {str(method)[:40]}` must be a name")
    if model is not None and not (isinstance(model, str) and model):
        found.append(f"`model: {str(model)[:40]}` must be a name or a path")
    elif given and not method and model is None:
        found.append("neither `method` nor `model` says what guesses tokens")
    quantization = given.get("quantization")
    if quantization is not None and not (isinstance(quantization, str) and quantization):
        found.append(f"`quantization: {str(quantization)[:40]}` must be a name")
    return [Problem(message=message, where=where, hint=hint) for message in found]


def own_draft(question: Question) -> tuple[Layer, ...]:
    """Draft layers that come with a model, where `speculative_config` asks for them: of the target,
    or of the model it names, often a copy. Of a model that has such layers vLLM loads no others
    (config/speculative.py hf_config_override: `deepseek_v3` becomes `deepseek_mtp`), whether the
    method is named or not."""
    method, subject = method_of(question.options), question.subject
    if draft_name(question.options) and question.draft is not None:
        subject = question.draft
    elif not method:
        return ()
    if subject.model is None or (method and not method.endswith("mtp")):
        return ()
    return draft_layers(subject.model, subject.config)


def method_of(options: Mapping[str, Any]) -> str:
    given = options.get("speculative_config") or {}
    return str(given.get("method") or "") if isinstance(given, Mapping) else ""


def separate_draft(question: Question) -> Draft | None:
    """The separate draft model that `speculative_config` names; an error where nothing is known of
    it, or where the model has no layers that could guess."""
    options, where = question.options, "speculative_config"
    given, method, name = options.get(where) or {}, method_of(options), draft_name(options)
    if not given or method in MODEL_FREE or question.draft_left_out:
        return None
    if own_draft(question) or (not name and not method):
        return None
    if method.endswith("mtp"):
        raise InputError.one(
            f"`method: {method[:40]}`: `{question.subject.name[:80]}` has no layers that guess "
            "tokens",
            where=where,
            hint='leave it out, or name a draft: `{"method": "eagle3", "model": …}`',
        )
    if method and method not in KINDS:
        raise InputError.one(
            f"`method: {method[:40]}` is not supported yet",
            where=where,
            hint=f"supported: mtp, {', '.join(KINDS)}, {', '.join(MODEL_FREE)}",
        )
    if not name:
        raise InputError.one(
            f"`method: {method[:40]}` needs the draft's name under `model`", where=where
        )
    draft = draft_of(method, name, question.draft, where, given.get("quantization"))
    check_ranks(draft, given.get("draft_tensor_parallel_size"), question)
    return draft


def check_ranks(draft: Draft, ranks: object, question: Question) -> None:
    """`draft_tensor_parallel_size` is the target's, or 1 of drafts that read its hidden states and
    are split as it is all the same (config/speculative.py _verify_and_get_draft_tp,
    v1/spec_decode/draft_model.py _raise_if_draft_tp_mismatch, 0.24.0)."""
    tensor = int(question.options.get("tensor_parallel_size", 1))
    allowed = (tensor,) if draft.kind == MODEL else (1, tensor)
    if ranks is not None and ranks not in allowed:
        raise InputError.one(
            f"`draft_tensor_parallel_size: {str(ranks)[:40]}` must be "
            f"{' or '.join(map(str, sorted(set(allowed))))}",
            where="speculative_config",
            hint="omit it: the draft is split as the model is",
        )
