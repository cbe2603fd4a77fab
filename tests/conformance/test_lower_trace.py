"""The formulas against the trace of the real code: allocated peaks and what they consist of, every family over a grid of jobs.

No family is left out, and of the examples only those that the real code itself refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import pytest

from memfit import kernels
from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build, families
from memfit.simulate.memory import Memory, memory

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

WORST, MEDIAN = 0.03, 0.005  # of what the job itself holds, the cuBLAS workspaces left out
GRID = tuple(product(("none", "full"), ("sdpa", "eager"), ("bf16", "autocast-bf16", "fp32")))
STRIDE = 5  # from one example to the next through the grid: all of it is met, and neighbours differ in everything
# Without states the passes decide where the peak is; with them, the optimizer's step may.
SMALL = {"batch": 2, "seq": 128, "optimizer": "sgd"}
LARGE: tuple[dict[str, Any], ...] = (
    {"batch": 2, "seq": 128, "optimizer": "sgd"},
    {"batch": 2, "seq": 128, "optimizer": "sgd", "checkpointing": "full", "attention": "eager", "precision": "autocast-bf16"},
    {"batch": 2, "seq": 64, "optimizer": "adamw", "attention": "eager"},
)
WIDER, LAYERS = 4, 4
WIDTHS = (
    "hidden_size", "n_embd", "n_embed", "d_model", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "head_dim", "rotary_dim",
    "word_embed_proj_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
# transformers stops at these: it wants a `sliding_window` where a layer slides, though the config may leave it out.
REFUSED = {("gemma2", 3), ("gpt_oss", 2), ("ministral", 2), ("qwen2", 3)}
# What is told apart in the same way by both; the rest is known to the formulas by its purpose, to the trace by how long it lives.
SURE = ("weights", "gradients", "optimizer", "buffers")
NAMES = sorted({one.name for one in families().values()})


class Case(NamedTuple):
    name: str
    config: Mapping[str, Any]
    job: Job


def grown(config: Mapping[str, Any]) -> dict[str, Any]:
    """The example as a model whose tensors matter: wider, with as many layers of the first kinds as it takes."""
    wide = {key: value * WIDER if key in WIDTHS and isinstance(value, int) else value for key, value in config.items()}
    return {**wide, **({"layerdrop": 0.0} if "layerdrop" in config else {})}


def cases(name: str) -> Iterator[Case]:
    """Every example with one job of the grid, another for each; and the first one grown, with three."""
    start = sum(len(families()[other].examples) for other in NAMES[: NAMES.index(name)])
    for index, example in enumerate(families()[name].examples):
        if (name, index) in REFUSED:
            continue
        checkpointing, attention, precision = GRID[(start + index) * STRIDE % len(GRID)]
        config = {**example, **({"layerdrop": 0.0} if "layerdrop" in example else {})}
        job = Job(checkpointing=checkpointing, attention=attention, precision=precision, **SMALL)
        yield Case(f"{index} {checkpointing} {attention} {precision}", config, job)
    for number, fields in enumerate(LARGE):
        yield Case(f"large {number}", grown(families()[name].examples[0]), Job(**fields))


def traced(case: Case) -> Memory:
    from memfit.trace import trace_config

    return memory(trace_config(case.config, case.job))


def wrong(ours: Memory, real: Memory) -> tuple[float, str]:
    """The difference of the peaks, and what else is wrong with the parts."""
    passing = 2 * kernels.cublas_workspace()  # one of the forward's thread, one of backward's
    whole = real.allocated - passing
    off = (ours.allocated - real.allocated) / whole
    apart = {part: (ours.parts.get(part, 0) - real.parts.get(part, 0)) / whole for part in SURE}
    bad = ", ".join(f"{part} {100 * share:+.2f} %" for part, share in apart.items() if abs(share) > WORST)
    return off, bad


@pytest.mark.parametrize("name", NAMES)
def test_a_family(name: str) -> None:
    found = {}
    for case in cases(name):
        off, bad = wrong(memory(lower(build(case.config), case.job)), traced(case))
        found[case.name] = off
        assert abs(off) <= WORST, f"{case.name}: {100 * off:+.2f} %"
        assert not bad, f"{case.name}: {bad}"
    assert median(abs(off) for off in found.values()) <= MEDIAN, found


@pytest.mark.parametrize(("name", "index"), sorted(REFUSED))
def test_what_is_left_out_cannot_run(name: str, index: int) -> None:
    with pytest.raises(InputError):
        traced(Case("", families()[name].examples[index], Job(**SMALL)))
