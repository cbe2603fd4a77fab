"""Generation: the formulas against the real `generate` on meta tensors; every family, both
attentions, both caches, windows and beams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import pytest
from tests.conformance import grid

from memfit import kernels
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build, families
from memfit.simulate.memory import Memory, memory

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

WORST, MEDIAN = 0.005, 0.0005  # of the peak without the cuBLAS workspace
# (sequences, prompt, new tokens): more of the prompt than of the answer, the prompt alone, and the
# other way round
SHAPES = ((4, 88, 4), (2, 120, 0), (2, 20, 44))
GRID = tuple(product(("eager", "sdpa"), ("dynamic", "static"), SHAPES))
# from one example to the next through the grid: all of it is met, and neighbours differ in
# everything
STRIDE = 5
# transformers stops at these: it wants a `sliding_window` where a layer slides, though the config
# may leave it out; it reads a mask made for a static cache as if it were the caller's
# (modeling_falcon.py build_alibi_tensor); gemma3_text's reads both ways.
REFUSED = {
    ("gemma2", 3),
    ("gpt_oss", 2),
    ("ministral", 2),
    ("qwen2", 3),
    ("gemma3_text", 3),
    ("falcon", 3),
    ("falcon", 5),
}
NAMES = sorted({one.name for one in families().values() if not (one.brought or one.graphs)})


class Case(NamedTuple):
    label: str
    config: Mapping[str, Any]
    job: Job


def cases(name: str) -> Iterator[Case]:
    """The first and the last example, each with another job of the grid."""
    examples = families()[name].examples
    for number, index in enumerate(sorted({0, len(examples) - 1})):
        if (name, index) in REFUSED:
            continue
        attention, cache, (batch, seq, new) = GRID[
            (2 * NAMES.index(name) + number) * STRIDE % len(GRID)
        ]
        job = Job(
            task="inference", attention=attention, cache=cache, batch=batch, seq=seq, new_tokens=new
        )
        yield Case(f"{index} {attention} {cache} {batch}x{seq}+{new}", examples[index], job)


def traced(config: Mapping[str, Any], job: Job) -> Memory:
    from memfit.trace import trace_config

    # A trace that skips the middle of an answer leaves out how several directions' positions grow
    return memory(trace_config(config, job, decode_all=build(config).own_positions))


def off(config: Mapping[str, Any], job: Job) -> float:
    real = traced(config, job).allocated
    return (memory(lower(build(config), job)).allocated - real) / (
        real - kernels.cublas_workspace()
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_family(name: str) -> None:
    found = {case.label: off(case.config, case.job) for case in cases(name)}
    assert all(abs(one) <= WORST for one in found.values()), found
    assert not found or median(abs(one) for one in found.values()) <= max(MEDIAN, WORST / 2), found


WINDOWED = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "sliding_window": 48,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3_text", "gpt_oss"])
def test_windows(kind: str, attention: str, cache: str) -> None:
    """A prompt longer than the window, and an answer that grows past it: views of whole blocks, or
    blocks that turn."""
    config = {
        **WINDOWED,
        "model_type": kind,
        **({"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "gpt_oss" else {}),
    }
    for seq, new in ((120, 4), (16, 64)):
        job = Job(
            task="inference", attention=attention, cache=cache, batch=4, seq=seq, new_tokens=new
        )
        assert abs(off(config, job)) <= WORST, (seq, new)


@pytest.mark.parametrize(
    "change",
    [
        {"beams": 3},
        {"beams": 3, "cache": "static"},
        {"beams": 3, "words": 32000},
        {"cache": "none"},
        {"logits": "all"},
        {"precision": "fp16", "attention": "eager"},
        {"precision": "fp32"},
        {"new_tokens": 90},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["llama", "phi3", "gpt2"])
def test_options(kind: str, change: dict[str, Any]) -> None:
    """`words`: a vocabulary of a real model's size, which a beam search chooses from."""
    change = dict(change)
    config = {
        **families()[kind].examples[0],
        **({"vocab_size": change.pop("words")} if "words" in change else {}),
    }
    job = Job(**{"task": "inference", "batch": 3, "seq": 33, "new_tokens": 12, **change})
    assert abs(off(config, job)) <= WORST


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"cache_bits": 2, "precision": "fp16"},
        {"seq": 120, "new_tokens": 140},
        {"attention": "eager", "batch": 1, "seq": 16, "new_tokens": 129},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_a_quantized_cache(kind: str, change: dict[str, Any]) -> None:
    """Its peak, and the most that decoding holds: what waits is packed anew by 128 tokens."""
    from memfit.trace import trace_config

    config = {
        **WINDOWED,
        "model_type": kind,
        "sliding_window": None,
        **({"pad_token_id": 0} if kind == "phi3" else {}),
    }
    job = Job(
        **{
            "task": "inference",
            "cache": "quantized",
            "batch": 4,
            "seq": 256,
            "new_tokens": 8,
            **change,
        }
    )
    assert abs(off(config, job)) <= WORST
    ours, real = (
        grid.height(memory(tape), "decode")
        for tape in (lower(build(config), job), trace_config(config, job))
    )
    assert real > 0
    assert abs(ours - real) <= WORST * real
