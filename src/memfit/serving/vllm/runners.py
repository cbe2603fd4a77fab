"""Which of vLLM's two model runners starts. The second one, which its log calls V2, does not count
CUDA graphs before 0.29.

Source: vLLM `config/vllm.py` use_v2_model_runner, 0.22.0 to 0.33.0.
"""

from __future__ import annotations

from memfit.model.model import Model
from memfit.model.modules import MoE
from memfit.serving.base import Question
from memfit.serving.parts import Recurrent
from memfit.serving.vllm.rules import Rules

# Kinds of drafts that the second runner knows (_get_v2_model_runner_unsupported_features, 0.26.0)
DRAFTS = ("eagle", "eagle3", "mtp", "dflash", "dspark")


def second_runner(question: Question, model: Model, rules: Rules, *, pooling: bool = False) -> bool:
    """Whether the second runner starts by default. Models that pool wait until all have it."""
    draft = question.options.get("speculative_config") or {}
    if draft and draft.get("method") not in DRAFTS:
        return False
    if rules.second_all or pooling:
        return rules.second_all
    named = question.subject.config.get("model_type") in rules.second_named
    if rules.second_dense:
        return named or not (has(model, MoE) or has(model, Recurrent))
    return named and not (rules.second_unquantized and quantized(question))


def steps_under_way(question: Question, rules: Rules, second: bool) -> int:
    """Steps whose tokens are not settled yet: two with asynchronous scheduling, which is on unless
    the draft is of a kind without it (config/vllm.py max_concurrent_batches, 0.26.0)."""
    pipeline = int(question.options.get("pipeline_parallel_size", 1))
    draft = question.options.get("speculative_config") or {}
    if not rules.in_flight:
        return 1
    if draft and draft.get("method") not in (*DRAFTS, "ngram_gpu"):
        return pipeline
    return pipeline + 1 if second or pipeline == 1 else pipeline


def has(model: Model, kind: type) -> bool:
    """Whether a layer of the model has such a mixer."""
    return any(isinstance(mixer, kind) for mixer in model.mixers)


def quantized(question: Question) -> bool:
    return bool(
        question.options.get("quantization") or question.subject.config.get("quantization_config")
    )
