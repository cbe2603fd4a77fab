"""Meta's torchtune: its own modelling code and recipes; the flags table of README.md is complete,
recipe tables are not. It was read at a commit of 19 November 2024, between 0.4 and 0.5, when torch
was 2.5.
"""

from __future__ import annotations

from memfit.truth import words
from memfit.truth.case import Unfit
from memfit.truth.published import Reading, reader
from memfit.truth.rows import Row

FLAGS = "torchtune=0.4,torch=2.5"


@reader("pytorch/torchtune")
def read(row: Row) -> Reading:
    for key in ("compile", "activation_offloading", "optimizer_in_bwd"):
        if row.more(key):
            raise Unfit("a technique without formula", key)
    if "not packed" in row.text("extra") or "unpacked" in row.text("extra"):
        raise Unfit("the length of the longest sequence is not stated", "unpacked")
    if "after model init" in str(row.more("what")) and row.metric != "weights":
        raise Unfit("a moment that is no peak of the run", row.more("what"))
    options = words.numbers(row.text("dtype")) | words.adapters(row)
    tokens = 1 if row.metric == "weights" else words.length(row.seq)  # weights do not depend on it
    options |= {
        "framework": "torchtune",
        "task": "finetune",
        "batch": words.batch(row),
        "seq": tokens,
        "optimizer": words.optimizer(row.text("optimizer")),
        "checkpointing": words.checkpointing(row.grad_checkpointing),
        "attention": "sdpa",
        "loss": "chunked" if "chunked" in str(row.more("loss")).lower() else "plain",
        "adapter_dtype": "base",
        "versions": FLAGS if "2024-11" in row.text("engine_version") else "",
    }
    return Reading(options=options)
