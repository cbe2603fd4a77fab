"""ModelScope's ms-swift benchmark (docs/source_en/LLM/Benchmark.md at b40f31df7^): Trainer with bf16 autocast on one A100, `max_memory_reserved`."""

from __future__ import annotations

from memfit.truth import words
from memfit.truth.case import Unfit
from memfit.truth.published import Reading, reader
from memfit.truth.rows import Row, count


@reader("modelscope/ms-swift")
def read(row: Row) -> Reading:
    options = words.numbers(row.text("dtype")) | words.adapters(row)
    if options["precision"] == "bf16":
        options["precision"] = "bf16-autocast"  # swift 1.x: `dtype=bf16` loads in bf16 and sets bf16=True for the Trainer
    if "flash" not in row.text("attention") and "/" in row.text("attention"):
        raise Unfit("the attention kernel is not stated, or has no formula", row.attention)
    options |= {
        "framework": "transformers", "task": "finetune", "batch": words.batch(row), "seq": words.length(row.seq), "clip": 1.0, "reentrant": True,
        "accumulate": count(row.more("grad_accum")) or 1, "optimizer": words.optimizer(row.text("optimizer")),
        "checkpointing": words.checkpointing(row.grad_checkpointing), "attention": words.attention(row.text("attention")),
        "versions": words.versions(row.text("engine_version")),
    }  # fmt: skip
    return Reading(options=options)
