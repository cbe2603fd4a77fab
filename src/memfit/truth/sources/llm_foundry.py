"""MosaicML's llm-foundry: speeds of pre-training its MPT models under Composer's FSDP (torch's
FSDP1, scripts/train/benchmarking/README.md). A model is GPT-2's architecture without biases, in the
sizes of scripts/train/yamls/pretrain/mpt-*.yaml, with a vocabulary of 50,368; weights lie in fp32
and are gathered in bf16. Attention is FlashAttention's first version in Triton:
`submit_benchmarks.py --attn_impl` was `triton` by default when the tables were written (b2a43a1,
2023-10-19, and 5e85bd6, 2024-01-06), `flash` since 7f0fdae of 2024-03-26. Rows of pure bf16 stand
there since 300cc5c of 2023-05-03, whose setup.py asks for torch 1.13.1; the others came two weeks
after torch 2.1 and later, and are taken for it."""

from __future__ import annotations

import json
import re

from memfit.strategy import FSDP, Strategy
from memfit.truth import words
from memfit.truth.case import Unfit
from memfit.truth.published import Reading, reader
from memfit.truth.rows import Row, count

SIZES = {  # width, layers, heads
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
MODEL = re.compile(r"mpt-(\d+m|\d+b)\b")
SHARDS = re.compile(r"fsdp(\d{1,5}) full_shard")
VOCABULARY = 50368
# Its tables say "1600 Gbps node-node interconnect (RoCE)": eight ports of 200, as only machines
# with SXM boards have them.
BOARDS = {"nvidia a100 40gb": "a100-sxm-40gb", "nvidia a100 80gb": "a100-sxm-80gb"}


@reader("mosaicml/llm-foundry", layouts=True)
def read(row: Row) -> Reading:
    name, layout = MODEL.match(row.text("model")), SHARDS.fullmatch(row.text("parallel"))
    gpus, length, micro = count(row.gpus), count(row.seq), count(row.more("grad_accum")) or 1
    if name is None or name[1] not in SIZES:
        raise Unfit("no config of the model", row.model)
    if layout is None or int(layout[1]) != gpus:
        raise Unfit("a strategy for several GPUs: not yet", row.text("parallel"))
    if length is None:
        raise Unfit("the length of the longest sequence is not stated", row.seq)
    if row.more("act_cpu_offload") == "True" or "fp8" in row.text("dtype"):
        raise Unfit("a technique without formula", "activations on the host, or fp8")
    options: words.Options = {
        "task": "pretrain",
        "batch": words.batch(row),
        "seq": length,
        "precision": "autocast-bf16",
        "accumulate": micro,
        "optimizer": "adamw",
        "attention": "flash-attn-2",
        "checkpointing": "full" if row.grad_checkpointing == "True" else "none",
    }
    pure = row.more("mp_mode") == "PURE"
    options["versions"] = "torch=1.13.1" if pure else "torch=2.1.0"
    reduced = "bf16" if pure else "fp32"
    fsdp = FSDP(
        size=int(layout[1]),
        version=1,
        param_dtype="bf16",
        reduce_dtype=reduced,
        backward_prefetch="post",
    )  # Composer's default
    strategy = Strategy(fsdp=fsdp)
    return Reading(
        options=options,
        strategy=strategy,
        config=config(name[1], length),
        notes=["GPT-2 in the sizes of MPT, with its biases"],
        gpu=BOARDS.get(row.text("gpu"), ""),
        attention="flash_attention_triton",
    )


def config(size: str, length: int) -> str:
    width, layers, heads = SIZES[size]
    return json.dumps(
        {
            "model_type": "gpt2",
            "n_embd": width,
            "n_layer": layers,
            "n_head": heads,
            "n_positions": length,
            "vocab_size": VOCABULARY,
            "activation_function": "gelu",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "tie_word_embeddings": True,
        }
    )
