"""Lightning's litgpt: its own modelling code; finetune scripts put the longest sample first (config_hub, tutorials)."""

from __future__ import annotations

from memfit.truth import words
from memfit.truth.case import Unfit
from memfit.truth.published import Reading, reader
from memfit.truth.rows import Row, count

PROMPT = 8  # generate/base.py asks "What food do llamas eat?" where no prompt is given: seven or eight tokens, by tokenizer


@reader("Lightning-AI/litgpt")
def read(row: Row) -> Reading:
    options = words.numbers(row.text("dtype"))
    options |= {
        "framework": "litgpt",
        "batch": words.batch(row),
        "attention": "sdpa",
        "versions": words.versions(row.text("engine_version")),
    }
    if str(row.task) == "inference":
        new = count(row.more("max_new_tokens"))
        if new is None:
            raise Unfit("the number of generated tokens is not stated", row.seq)
        return Reading(
            options={**options, "task": "inference", "seq": PROMPT, "new_tokens": new, "cache": "static"}, notes=["default prompt"]
        )
    options |= words.adapters(row) | {"seq": words.length(row.seq), "task": "finetune", "optimizer": words.optimizer(row.text("optimizer"))}
    options |= {"checkpointing": words.checkpointing(row.grad_checkpointing), "adapter_dtype": "base", "prepare_kbit": False}
    return Reading(options=options)
