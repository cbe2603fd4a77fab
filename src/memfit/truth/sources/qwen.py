"""Alibaba's speed benchmarks of Qwen 1.5 to 3: `generate` with transformers, one prompt, 2048 new
tokens (docs/source of QwenLM/Qwen3)."""

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
    notes = []
    if "transformers" not in versions and "qwen1.5" in row.text("model"):
        # what Qwen1.5 asked for when that page was written (README of QwenLM/Qwen1.5, 2024-02)
        versions += ",transformers=4.37"
        notes.append("transformers 4.37 is taken, the first that knows the model")
    options |= {
        "task": "inference",
        "framework": "transformers",
        "batch": words.batch(row),
        "attention": words.attention(row.text("attention")),
        "versions": versions,
    }
    return Reading(options=options, notes=notes)
