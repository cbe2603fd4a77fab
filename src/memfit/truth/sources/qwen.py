"""Alibaba's speed benchmarks of Qwen 1.5 to 3: `generate` with transformers, one prompt, 2048 new tokens (docs/source of QwenLM/Qwen3)."""

from __future__ import annotations

from memfit.truth import words
from memfit.truth.case import Unfit
from memfit.truth.published import Reading, reader
from memfit.truth.rows import Row


@reader("QwenLM/Qwen3", "QwenLM/Qwen2.5", "QwenLM/Qwen2", "QwenLM/Qwen1.5")
def read(row: Row) -> Reading:
    if "transformers" not in row.text("engine"):
        raise Unfit("serving engines: not yet", row.engine)
    options = words.numbers(row.text("dtype")) | words.lengths(row)
    versions = words.versions(row.text("engine_version"))
    options |= {
        "task": "inference", "framework": "transformers", "batch": words.batch(row), "attention": words.attention(row.text("attention")),
        "versions": versions,
    }  # fmt: skip
    return Reading(options=options)
