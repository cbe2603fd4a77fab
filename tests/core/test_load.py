"""Many questions to one process: memory stays flat, and threads get the answers that one gets.
`MEMFIT_LOAD` is the number of estimates: a sample by default, 20,000 in `make whole`."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import memfit

CASES = int(os.environ.get("MEMFIT_LOAD", "160"))
WARM = 60  # estimates until the caches are full that are full at some time
# Bytes that may stay: pages of a heap that has settled, and of each estimate (measured: 0.7 KiB)
SETTLED, EACH = 2 * 2**20, 2**10
THREADS = 16
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 20,
}


def questions(count: int) -> Iterator[dict[str, Any]]:
    """So many, no two alike."""
    methods = ("full", "lora", "qlora")
    gpus = ("rtx-4090", "a100", "h100", "rtx-3090")
    optimizers = ("adamw", "adamw_fused", "adamw_8bit", "sgd")
    for number in range(count):
        yield {
            "method": methods[number % 3],
            "gpu": gpus[number // 3 % 4],
            "optimizer": optimizers[number // 12 % 4],
            "batch": 1 + number // 48 % 5,
            "seq": 16 + number // 48,
            "checkpointing": ("none", "full")[number % 2],
        }


def answered(question: dict[str, Any]) -> tuple[int, int | None, str | None, float]:
    found = memfit.estimate(MODEL, **question)
    assert found.time is not None
    return found.memory.allocated, found.memory.reserved, found.verdict, found.time.seconds


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_no_two_questions_are_alike() -> None:
    some = [tuple(one.values()) for one in questions(20_000)]
    assert len(set(some)) == len(some)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc (Linux)")
def test_memory_stays_flat_over_many_estimates() -> None:
    asked = questions(CASES)
    for one in itertools.islice(asked, WARM):
        answered(one)
    before = resident()
    for one in asked:
        answered(one)
    assert resident() - before < SETTLED + EACH * (CASES - WARM)


def test_threads_get_what_one_gets() -> None:
    asked = list(questions(max(64, CASES // 10)))
    alone = [answered(one) for one in asked]
    with ThreadPoolExecutor(THREADS) as pool:
        together = list(pool.map(answered, asked))
    assert together == alone
    assert gc.isenabled()
