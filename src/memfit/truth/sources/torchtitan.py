"""Meta's torchtitan: FSDP2 over Llama as its configs of 2025 run it (llama3_8b.toml: batch 1, 8192
tokens, selective checkpoints by operation, AdamW fused, norms clipped at 1, weights in fp32 and
products in bf16, parallelize_llama.py apply_fsdp), started by its run_train.sh, which asks for
expandable segments (since 2025 at the latest, not by 2024-09). What Inductor compiles, fp8, and
other implementations of FSDP are not what the formulas say; nor is its code between 2024-06-12 and
2025, which nobody here has read. Before, the loop held the logits through backward (train.py at
f6d9de752 of 2024-03-28 and 4eb4bfc54 of 2024-06-04), and the optimizer was AdamW as torch has it,
unless `fused` was said."""

from __future__ import annotations

import re

from memfit.strategy import FSDP, TP, Strategy
from memfit.truth import words
from memfit.truth.case import Unfit
from memfit.truth.published import Reading, reader
from memfit.truth.rows import Row, count

SHARDS = re.compile(r"fsdp(\d{1,5})(?: tp(\d{1,3}))?")
# since then the ends are units of their own (commit 83e694105); before, the root's
ENDS = "2025-07-28"
HELD = "2024-06-12"  # until then (commit e29b6b4d4)
# torch by month: torchtitan wants its nightly builds (README.md), whose version is the next to be
# released. An RMSNorm is one kernel from 2.9 on; that of torchtitan until 2025-03-19
# (models/norms.py at 40f8fd007, deleted by 3b39d7ab0) is the same chain of kernels as torch's own
# was until then.
NIGHTLY = {"2025-07": (2, 9), "2025-03": (2, 8), "2025-01": (2, 7), "2024-03": (2, 4)}
EAGER = ("FSDP2", "FSDP2 eager", "eager FSDP2")
# Meta's own A100s call themselves PG509-210, PCI id 20B2 as SXM4 boards of 80 GB have it, on
# NVLink, at 330 W in place of 400 (pytorch-labs/tritonbench, tritonbench/utils/gpu_utils.py
# POWER_LIMIT).
BOARDS = {"nvidia a100 80gb (79.15 gib)": "a100-sxm-80gb"}


@reader("pytorch/torchtitan", layouts=True)
def read(row: Row) -> Reading:
    gpus, length = count(row.gpus) or 1, count(row.seq)
    layout = SHARDS.fullmatch(row.text("parallel"))
    if layout is None or int(layout[1]) * int(layout[2] or 1) != gpus:
        raise Unfit("a strategy for several GPUs: not yet", row.text("parallel"))
    for key in ("compile", "float8", "recipe"):
        if row.more(key):
            raise Unfit("a technique without formula", key)
    done_by = next(
        (str(row.more(key)) for key in ("fsdp_impl", "impl", "engine", "trainer") if row.more(key)),
        EAGER[0],
    )
    if done_by not in EAGER:
        raise Unfit("a technique without formula", done_by)
    version = row.text("engine_version")
    early = "2024-03" <= version < HELD
    if not early and not re.match(r"202[5-9]", version):
        raise Unfit("a version whose code was not read", row.text("engine_version"))
    if length is None:
        raise Unfit("the length of the longest sequence is not stated", row.seq)
    options: words.Options = {
        "framework": "torchtitan",
        "task": "pretrain",
        "batch": words.batch(row),
        "seq": length,
        "precision": "fp32",
        "optimizer": "adamw_fused",
        "clip": 1.0,
        "alloc_conf": "expandable_segments:True",
        "versions": f"torchtitan=0.1,torch={nightly(version)}",
        "loss": "chunked" if str(row.more("loss") or "").startswith("chunked") else "plain",
        "checkpointing": "selective"
        if row.text("grad_checkpointing").startswith("selective")
        else words.checkpointing(row.grad_checkpointing),
    }
    if early:
        options |= {
            "keep_outputs": True,
            "alloc_conf": "",
            "optimizer": "adamw_fused" if "fused=true" in row.text("optimizer") else "adamw",
        }
    wrap = "ends" if row.text("engine_version") >= ENDS else "layers"
    fsdp = FSDP(size=int(layout[1]), param_dtype="bf16", reduce_dtype="fp32", wrap=wrap)
    split = (
        TP(size=int(layout[2]), sequence=True, parallel_loss=True) if layout[2] else None
    )  # its defaults (parallelize_llama.py apply_tp)
    return Reading(
        options=options, strategy=Strategy(fsdp=fsdp, tp=split), gpu=BOARDS.get(row.text("gpu"), "")
    )


def nightly(month: str) -> str:
    """The version of torch's nightly builds of that month."""
    major, minor = next(version for since, version in NIGHTLY.items() if month >= since)
    return f"{major}.{minor}"
