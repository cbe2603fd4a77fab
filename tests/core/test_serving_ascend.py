"""SGLang's weights on Ascend NPUs, after ModelSlim's matrices were laid out anew."""

from __future__ import annotations

import pytest

from memfit.errors import InputError
from memfit.serving import find_engine
from memfit.serving.base import Device, Question
from memfit.serving.result import ServingAnswer
from memfit.serving.sglang.ascend import loaded_bytes
from memfit.serving.stored import Matrix, Relaid, RelaidStack, Scheme, tensors
from memfit.truth.served import subject_of

MIB, GIB = 2**20, 2**30
PAGE = 20 * MIB
SHARED = {"enable_dp_attention": True, "enable_dp_lm_head": True, "moe_a2a_backend": "deepep"}


def answer(model: str, ranks: int, version: str = "0.5.7", **options: object) -> ServingAnswer:
    device = Device(name="Ascend NPU", total=64 * GIB, free=int(60.8 * GIB))
    given = {"tp_size": ranks, "quantization": "modelslim", "mem_fraction_static": 0.8, **options}
    return find_engine("sglang").answer(
        Question(
            subject=subject_of(model), devices=(device,) * ranks, options=given, version=version
        )
    )


@pytest.mark.parametrize(
    ("model", "ranks", "options", "logged"),
    [
        # logs of 4 January 2026; the last three are of no row that memfit is judged by
        ("Qwen3-235B-A22B-W8A8", 16, {"dp_size": 16, **SHARED}, 23.78),
        ("Qwen3-235B-A22B-W8A8", 32, {"dp_size": 32, **SHARED}, 15.36),
        ("Qwen3-30B-A3B-w8a8", 2, {}, 15.61),
        ("DeepSeek-R1-0528-w4a8-per-channel", 16, {"dp_size": 16, **SHARED}, 40.11),
        ("Qwen3-Coder-480B-A35B-Instruct-w8a8", 32, {"dp_size": 4, **SHARED}, 18.24),
        (
            "Qwen3-Coder-480B-A35B-Instruct-w8a8",
            16,
            {"dp_size": 2, **SHARED, "enable_dp_lm_head": False},
            31.63,
        ),
        (
            "Qwen3-Coder-480B-A35B-Instruct-w8a8",
            32,
            {"dp_size": 4, **SHARED, "moe_a2a_backend": "ascend_fuseep"},
            22.72,
        ),
    ],
)
def test_weights_as_the_logs_of_ascend_cards_say(
    model: str, ranks: int, options: dict[str, object], logged: float
) -> None:
    made = answer(model, ranks, **options)
    assert made.figures["weights_gib"] == pytest.approx(logged, rel=0.005)


def test_a_hole_keeps_parts_of_two_pages() -> None:
    """Experts change places, and each layer leaves a hole as large as its smaller stack."""
    layers = 64
    sizes = (RelaidStack(96 * MIB), RelaidStack(48 * MIB)) * layers
    holes = loaded_bytes(sizes, "0.5.7") - sum(sizes)
    assert 0.8 * PAGE * layers < holes < 1.2 * PAGE * layers
    alike = (Relaid(96 * MIB),) * layers
    assert loaded_bytes(alike, "0.5.7") - sum(alike) < 2 * PAGE
    unmarked = tuple(int(size) for size in sizes)
    assert loaded_bytes(unmarked, "0.5.7") - sum(unmarked) < PAGE


def test_small_holes_are_filled_by_the_next_layer() -> None:
    sizes = (RelaidStack(48 * MIB), RelaidStack(24 * MIB)) * 64
    assert loaded_bytes(sizes, "0.5.7") - sum(sizes) < 3 * PAGE


def test_the_fused_dispatch_keeps_the_second_stack_twice_where_experts_are_listed() -> None:
    sizes = (RelaidStack(150 * MIB), RelaidStack(75 * MIB)) * 62
    kept = loaded_bytes(sizes, "0.5.7", fused=True, listed=True)
    freed = loaded_bytes(sizes, "0.5.7", fused=True, listed=False)
    assert kept - freed > 0.7 * 62 * 75 * MIB
    assert loaded_bytes(sizes, "0.5.9", fused=True, listed=True) == loaded_bytes(
        sizes, "0.5.9", fused=True, listed=False
    )


def test_experts_have_offsets_beside_their_scales() -> None:
    stack = Matrix(name="up", inputs=512, parts=(256, 256), experts=8)
    eight = list(tensors(stack, Scheme(kind="modelslim"), None))
    assert eight == [8 * 512 * 512, 8 * 512 * 4, 8 * 512 * 4]
    four = list(tensors(stack, Scheme(kind="modelslim4"), None))
    assert four == [4 * 512 * 512, 8 * 512 * 8, 8 * 512 * 4, 8 * 512 * 4]


def test_contexts_of_sparse_attention_copy_its_weights() -> None:
    model, spread = "DeepSeek-V3.2-Exp-W8A8", {"moe_a2a_backend": "deepep", "moe_dense_tp_size": 1}
    split = answer(model, 32, **spread)
    copied = answer(model, 32, **spread, enable_nsa_prefill_context_parallel=True)
    assert copied.figures["weights_gib"] - split.figures["weights_gib"] > 10
    with pytest.raises(InputError, match="must be 8"):
        answer(model, 16, quantization=None, enable_nsa_prefill_context_parallel=True)
    with pytest.raises(InputError, match="sparse attention"):
        answer("DeepSeek-R1-0528-w8a8", 8, enable_nsa_prefill_context_parallel=True)
    gpu = answer(model, 8, quantization=None, enable_nsa_prefill_context_parallel=True)
    assert gpu.figures["weights_gib"] > answer(model, 8, quantization=None).figures["weights_gib"]


def test_modelslim_leaves_the_indexer_in_16_bits() -> None:
    options = {"dp_size": 8, **SHARED, "moe_dense_tp_size": 1}
    assert answer("DeepSeek-V3.2-Exp-W8A8", 32, **options).figures["weights_gib"] == pytest.approx(
        31.91, rel=0.008
    )
