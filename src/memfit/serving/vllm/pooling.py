"""Models that vLLM runs for embeddings, scores and labels: how it picks them, their steps, and what
an encoder, which has no KV cache, takes of the GPU.

Source: vLLM `config/model.py` _get_runner_type, is_chunked_prefill_supported and
_SUFFIX_TO_DEFAULTS, `config/vllm.py` (PIECEWISE), `v1/engine/core.py` _initialize_kv_caches, 0.11.0
to 0.33.0. vLLM does not profile an encoder, and its log has no line about a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.model.model import Model
from memfit.serving.base import Question
from memfit.serving.text_encoders import is_encoder
from memfit.serving.vllm.profile import step, workspace
from memfit.serving.vllm.rules import Rules, parse
from memfit.serving.weights import Rank

RUNNERS = ("auto", "generate", "pooling", "draft")
CONVERTS = ("auto", "none", "embed", "classify", "reward")
# `--task` of older versions (0.9.2 config.py _ResolvedTask and _RUNNER_TASKS); the others generate
TASKS = ("embed", "embedding", "encode", "classify", "reward", "score")
OTHER_TASKS = ("auto", "generate", "transcription", "draft")
# Ends of the names of classes that pool; others that end in `Model` come last
SUFFIXES = (
    ("ForCausalLM", False),
    ("ForConditionalGeneration", False),
    ("ChatModel", False),
    ("LMHeadModel", False),
    ("ForTextEncoding", True),
    ("Classification", True),
    ("ForRewardModeling", True),
    ("Model", True),
)
V0_TOKENS = 32768  # 0.8.5 config.py _POOLING_MODEL_MAX_NUM_BATCHED_TOKENS
ENCODERS_IN_V1 = (0, 10, 1)  # BertEmbeddingModel is SupportsV0Only in 0.10.0, not in 0.10.2


def needs_v0(question: Question) -> bool:
    """Whether the model is an encoder, and the version runs those by V0 alone, which sets a cache
    aside for them that stays empty (worker/worker.py _init_cache_engine, 0.8.5 and 0.10.0)."""
    old = parse(question.version) < ENCODERS_IN_V1
    return old and is_encoder(question.subject.model)


def pools(question: Question, model: Model) -> bool:
    """Whether vLLM runs the model for its hidden states and generates nothing."""
    options = question.options
    runner, convert = (str(options.get(name) or "auto") for name in ("runner", "convert"))
    if runner != "auto":
        return runner == "pooling"
    if convert not in ("auto", "none") or str(options.get("task") or "auto") in TASKS:
        return True
    return is_encoder(model) or by_class(question.subject.config)


def by_class(config: Mapping[str, Any]) -> bool:
    """What the name of the class says. Without one the model generates."""
    named = config.get("architectures")
    kind = str(named[0]) if isinstance(named, list) and named else ""
    return next((pooled for suffix, pooled in SUFFIXES if kind.endswith(suffix)), False)


def step_tokens(tokens: int, length: int, rules: Rules) -> int:
    """Tokens of a step whose prompts cannot be cut: a whole one, and from 0.11.1 on no fewer than
    other models take (arg_utils.py _set_default_max_num_seqs_and_batched_tokens_args)."""
    if rules.engine == 0:
        return max(length, V0_TOKENS)
    return max(length, tokens) if rules.long_pooling_steps else length


def peak(model: Model, rank: Rank, tokens: int, requests: int, width: int, rules: Rules) -> int:
    """Bytes of the largest moment of a step. A head of masked words has logits of all tokens, in
    the model's numbers and twice in fp32 (pooler/tokwise/heads.py)."""
    inside = workspace(model, rank, tokens, width, rules) + step(model, rank, tokens, width, rules)
    pooled = tokens * model.width * width + min(requests, tokens) * model.width * 4 * 2
    words = any(one.name == "mlm_head.decoder" for one in model.final)
    logits = tokens * model.vocab * (width + 4 + 4) if words else 0
    return max(inside, pooled + logits)


def longer_than_a_step(batched: int, length: int) -> str:
    """The error where a prompt of the full length is more than a step takes
    (config/scheduler.py verify_max_model_len)."""
    return (
        f"ValueError: max_num_batched_tokens ({batched}) is smaller than max_model_len ({length}). "
        "This effectively limits the maximum sequence length to max_num_batched_tokens and makes "
        "vLLM reject longer sequences. Please increase max_num_batched_tokens or decrease "
        "max_model_len."
    )


__all__ = ["by_class", "longer_than_a_step", "needs_v0", "peak", "pools", "step_tokens"]
