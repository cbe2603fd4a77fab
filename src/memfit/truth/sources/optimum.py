"""Hugging Face's optimum: its GPTQ benchmark against plain transformers 4.35 (tests/benchmark at
87fcf9f0)."""

from __future__ import annotations

from memfit.truth import words
from memfit.truth.published import Reading, reader
from memfit.truth.rows import Row


@reader("huggingface/optimum")
def read(row: Row) -> Reading:
    """`benchmark_gptq.py` loads with a device_map and calls `generate`, or the model once for
    `prefill only`."""
    options = words.numbers(row.text("dtype")) | words.lengths(row)
    options |= {
        "task": "inference",
        "framework": "transformers",
        "batch": words.batch(row),
        "attention": words.attention(row.text("attention")),
        "versions": words.versions(row.text("engine_version")),
        "logits": "all",
    }
    return Reading(options=options)
