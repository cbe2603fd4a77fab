"""ModelScope's ms-swift benchmark (docs/source_en/LLM/Benchmark.md at b40f31df7^): Trainer with
bf16 autocast on one A100, `max_memory_reserved`."""

from __future__ import annotations

import re

from memfit.strategy import DDP, Split, Strategy
from memfit.truth import words
from memfit.truth.case import Unfit
from memfit.truth.published import Reading, reader
from memfit.truth.rows import Row, count

CURRENT = (("2024-03", "4.38"), ("torch 2.1.1", "4.36"))


@reader("modelscope/ms-swift", layouts=True)
def read(row: Row) -> Reading:
    notes: list[str] = []
    options = words.numbers(row.text("dtype")) | words.adapters(row)
    if re.search(r"targets?=\S+ default", row.text("method")):
        # swift/llm/utils/model.py LoRATM of that time: Llama's relatives had the three projections,
        # others their fused one
        options["targets"] = "q_proj,k_proj,v_proj,c_attn,query_key_value,W_pack"
    if options["precision"] == "bf16":
        options["precision"] = (
            # swift 1.x: `dtype=bf16` loads in bf16 and sets bf16=True for the Trainer
            "bf16-autocast"
        )
    said, first = row.text("attention"), str(row.model).startswith("Qwen/Qwen-")
    apart = "/" in said and "flash" not in said
    if apart and not first:
        raise Unfit("the attention kernel is not stated, or has no formula", row.attention)
    kernel = (
        "sdpa" if apart else words.attention(said)
    )  # what Qwen's code runs without flash-attn over torch 2 (Qwen/Qwen-7B modeling_qwen.py)
    # Trainers hand a mask over with every batch; transformers' own code looks whether anything is
    # padded, that of Qwen's first models does not
    options["packing"] = words.batch(row) == 1 and not first
    options |= {
        "framework": "transformers",
        "task": "finetune",
        "batch": words.batch(row),
        "seq": length(row),
        "clip": 1.0,
        "reentrant": True,
        "accumulate": count(row.more("grad_accum")) or 1,
        "optimizer": words.optimizer(row.text("optimizer").removesuffix(" unless galore")),
        "checkpointing": words.checkpointing(row.grad_checkpointing),
        "attention": kernel,
        "versions": words.versions(row.text("engine_version")),
    }
    if "transformers" not in options["versions"]:
        current = next(
            (version for month, version in CURRENT if month in row.text("engine_version")), "4.36"
        )
        options["versions"] = ",".join(
            filter(None, (options["versions"], f"transformers={current}"))
        )
        notes.append(f"transformers {current} is taken, the newest when that was measured")
    strategy, rank = spread(row)
    varied = str(row.more("dataset") or "").partition(", ")[2]
    if varied:
        notes.append(
            f"its batches are as long as a dataset's texts ({varied}), and each is taken "
            "for the longest"
        )
    return Reading(options=options, notes=notes, strategy=strategy, rank=rank)


def length(row: Row) -> int:
    """Packed texts fill the longest length allowed (scripts/benchmark/config/tuner.json:
    `max_length` 2048; 7,900 of 78,237 samples are left)."""
    cap = re.match(r"cap (\d+)", str(row.seq))
    return (
        int(cap[1])
        if cap
        and "packing=true" in row.text("method")
        and row.more("exp") != "lora+packing+lazytokenize"
        else words.length(row.seq)
    )


def spread(row: Row) -> tuple[Strategy, int | None]:
    """One process deals the layers to its GPUs (swift/llm/sft.py llm_sft: `device_map="auto"`), or
    DDP; the notes say which GPU is meant."""
    gpus, said = count(row.gpus) or 1, row.text("parallel")
    if gpus == 1:
        return Strategy(), None
    if said == f"ddp{gpus}":
        return Strategy(ddp=DDP(size=gpus)), None
    if "device_map" not in said:
        raise Unfit("a strategy for several GPUs: not yet", said)
    meant = re.search(r"gpu (\d+) of", str(row.notes or "").lower())
    return Strategy(split=Split(size=gpus)), int(meant[1]) if meant else None
