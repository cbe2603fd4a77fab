"""Whisper in vLLM: since when its rules are known, and what its log counts for a request."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.model.model import Model
from memfit.serving.base import Question
from memfit.serving.parts import Crossing
from memfit.serving.vllm.rules import Rules, parse

SINCE = (0, 11, 0)  # the first version whose V1 was read


def sound_problems(
    question: Question, model: Model, rules: Rules, batched: int
) -> Iterator[Problem]:
    """What is wrong with a question about a model that hears, and what its answer means."""
    found = (one.length for one in model.attentions if isinstance(one, Crossing))
    length = next(found, 0)
    if length and (parse(question.version) < SINCE or rules.engine == 0):
        message = f"`{model.family}` in vLLM before 0.11 is not supported yet"
        yield Problem(message=message, where="engine_version")
    if rules.crossing_steps and 0 < length < batched:
        yield Problem(
            level="note",
            message=f"vLLM's concurrency counts {batched:,} outputs of the encoder for each "
            f"request (max_num_batched_tokens); half a minute of sound has {length:,}",
            where="max_num_batched_tokens",
        )


__all__ = ["sound_problems"]
