"""Context parallelism of one rank: torch's ring attention under the Trainer's own preparation, with
FSDP2 over the same ranks."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.errors import InputError
from memfit.tape import Alloc, Comm

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from tests.torch.test_ranks_tensors import LAYERS, MATRICES, NORMS, D, T, V, loaded, traced  # noqa: E402

pytestmark = pytest.mark.torch


def test_weights_are_sharded_over_the_ranks_of_a_sequence_and_logits_are_of_a_part() -> None:
    tape = traced("cp=2 fsdp=2", batch=2)
    assert loaded(tape) == 2 * (MATRICES + NORMS) // 4
    rows = {
        event.size // (2 * V)
        for event in tape
        if isinstance(event, Alloc)
        and event.where == "lm_head"
        and event.formula.endswith(f"{V}] bfloat16")
    }  # type: ignore[union-attr]
    assert 2 * T // 2 in rows
    assert 2 * T not in rows


@pytest.mark.parametrize(
    ("style", "op"), [("allgather", "all_gather_into_tensor"), ("ring", "all_to_all_single")]
)
def test_keys_and_values_travel(style: str, op: str) -> None:
    """Of every layer: the rank's keys and values in one piece, two copies gathered or one handed
    on."""
    tape = traced(f"cp=2,style={style} fsdp=2")
    sizes = [
        event.size
        for event in tape
        if isinstance(event, Comm) and event.op == op and event.group == "cp"
    ]
    both = 2 * (T // 2) * D * 2  # keys and values in 16 bits; heads are repeated for SDPA
    assert len(sizes) >= 2 * LAYERS
    assert min(sizes) in (both // 2, both, 2 * both)


@pytest.mark.parametrize(
    ("use", "job", "part"),
    [
        ("cp=2", {}, "a trace supports context parallelism with FSDP2 only"),
        (
            "cp=2,style=ulysses fsdp=2",
            {},
            "transformers' Ulysses attention is DeepSpeed's and needs ZeRO",
        ),
        (
            "cp=2 fsdp=2",
            {"attention": "eager"},
            "the Trainer supports context parallelism with SDPA attention only",
        ),
        (
            "cp=2 fsdp=2",
            {"attention": "math"},
            "torch's context parallelism needs causal SDPA, without the math kernel",
        ),
        ("cp=2 fsdp=2", {"seq": 30}, "4 chunks do not divide 30"),
    ],
)
def test_what_cannot_be_run_is_refused(use: str, job: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=part):
        traced(use, **job)
