"""Answer.AI's fsdp_qlora: its own loop (train.py) around transformers, PEFT and torch's FSDP1, read
at commit 27ce87d of March 2024."""

from __future__ import annotations

from memfit.strategy import FSDP, Strategy
from memfit.truth import words
from memfit.truth.published import Reading, reader
from memfit.truth.rows import Row, count

# None are named; these were the newest when the tables were made, in February and March 2024.
VERSIONS = "transformers=4.38.2,torch=2.2.1,peft=0.9.0,bitsandbytes=0.43.0"


@reader("AnswerDotAI/fsdp_qlora", layouts=True)
def read(row: Row) -> Reading:
    """`--precision bf16`: everything in it, adapters too, and no mixed precision. Units are layers
    and adapters' matrices, as PEFT's policy has them, with torch's own prefetching;
    `checkpoint_wrapper` goes around the layer inside its unit. The loop holds the outputs through
    backward."""
    options = words.adapters(row) | {
        "framework": "transformers",
        "task": "finetune",
        "precision": "bf16",
        "batch": words.batch(row),
        "seq": words.length(row.seq),
        "optimizer": "adamw",
        "checkpointing": words.checkpointing(row.grad_checkpointing),
        "reentrant": True,
        "attention": "sdpa",
        "adapter_dtype": "base",
        "keep_outputs": True,
        "versions": VERSIONS,
    }
    if options["method"] == "qlora":
        options["prepare_kbit"] = False
    parallel, gpus = row.text("parallel"), count(row.gpus) or 1
    layout = FSDP(
        size=gpus,
        version=1,
        backward_prefetch="pre",
        orig_params=False,
        checkpoint_inside=True,
        shard="no_shard" not in parallel,
        offload=bool(row.more("cpu_offload_params")),
    )
    return Reading(
        options=options,
        strategy=Strategy(fsdp=layout),
        notes=["assumes the versions of the time"],
    )
