"""Workspaces of vLLM's kernels for experts, and what else they and FlashInfer's attention leave in
CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memfit.hardware import find_gpu
from memfit.model.model import Model
from memfit.model.modules import MoE
from memfit.serving import find_engine
from memfit.serving.base import Device, Question
from memfit.serving.vllm.experts import activation, experts_room, kernel
from memfit.serving.vllm.graphs import FLASHINFER_BUFFER, captured, flashinfer_attends, graph_bytes
from memfit.serving.vllm.profile import peak
from memfit.serving.vllm.setup import Setup, set_up
from memfit.truth.served import UNSEEN, judge, read_served, subject_of

MIB = 2**20
GEMMA, QWEN = "nvidia/Gemma-4-26B-A4B-NVFP4", "nvidia/Qwen3.6-35B-A3B-NVFP4"
PLAIN, FP8 = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-FP8"


def question(model: str, version: str, gpu: str, count: int = 1, **options: object) -> Question:
    found = find_gpu(gpu)
    device = Device(name=found.name, total=found.memory, gpu=found)
    return Question(
        subject=subject_of(model), devices=(device,) * count, options=options, version=version
    )


def settings(model: str, version: str, gpu: str, count: int = 1, **options: object) -> Setup:
    return set_up(question(model, version, gpu, count, **options))


def experts(model: Model) -> MoE:
    return next(
        block.mixer
        for layer, _ in model.kinds
        for block in layer.blocks
        if isinstance(block.mixer, MoE)
    )


@pytest.mark.parametrize(
    ("model", "version", "gpu", "found"),
    [
        (PLAIN, "0.13.0", "h100-sxm-80gb", "direct"),
        (PLAIN, "0.14.1", "h100-sxm-80gb", "triton"),
        (PLAIN, "0.20.2", "h100-sxm-80gb", "flashinfer"),
        (PLAIN, "0.20.2", "a100-sxm-80gb", "triton"),
        (FP8, "0.20.2", "h100-sxm-80gb", "triton"),
        (FP8, "0.20.2", "b200", "flashinfer"),
        (QWEN, "0.14.1", "rtx-5090", "cutlass"),
        (QWEN, "0.15.1", "rtx-5090", "flashinfer"),
        (QWEN, "0.20.2", "h100-sxm-80gb", "triton"),  # as wide as Marlin's
        (GEMMA, "0.20.2", "rtx-5090", "cutlass"),  # GELU, which FlashInfer has not
        ("openai/gpt-oss-20b", "0.18.0", "rtx-4090", "direct"),
        ("openai/gpt-oss-20b", "0.20.2", "rtx-4090", "marlin"),
        ("openai/gpt-oss-20b", "0.20.2", "h100-sxm-80gb", "direct"),
    ],
)
def test_experts_run_by_the_kernel_that_the_version_picks(
    model: str, version: str, gpu: str, found: str
) -> None:
    setup = settings(model, version, gpu)
    mixer = experts(setup.model)
    assert kernel(mixer, setup.rank, setup.rules, activation(setup.model)) == found


def test_a_named_kernel_runs_the_experts() -> None:
    setup = settings(QWEN, "0.20.2", "rtx-5090", moe_backend="marlin")
    assert kernel(experts(setup.model), setup.rank, setup.rules) == "marlin"


def test_workspaces_are_as_wide_as_what_lies_in_them() -> None:
    """Qwen3-30B-A3B: eight experts of 768 beside 2,048, so both workspaces are 2,048 wide."""
    setup = settings(PLAIN, "0.14.1", "h100-sxm-80gb")
    room = experts_room(experts(setup.model), setup.rank, 8192, 2, setup.rules)
    assert room.kept == 8192 * 8 * 2 * (2048 + 2048)
    assert room.inside == 8192 * 2048 * 2


def test_pieces_of_a_long_step_share_a_workspace_beside_the_output() -> None:
    """0.14 to 0.17 take 16,384 tokens at once."""
    setup = settings(PLAIN, "0.14.1", "h100-sxm-80gb")
    mixer = experts(setup.model)
    long, short = (experts_room(mixer, setup.rank, one, 2, setup.rules) for one in (40000, 16384))
    assert long.kept == short.kept + 40000 * 2048 * 2


def test_workspaces_stay_beside_the_sampler() -> None:
    """The logits of 1,024 requests are the peak of both, and the workspace adds to one."""
    setup = settings(PLAIN, "0.14.1", "h100-sxm-80gb")

    def largest(**rules: Any) -> int:
        changed = replace(setup.rules, **rules)
        return peak(setup.model, setup.rank, 8192, 1024, 2, changed)

    kept = experts_room(experts(setup.model), setup.rank, 8192, 2, setup.rules).kept
    assert largest() - largest(expert_workspaces=()) == kept == 512 * MIB


def test_cutlass_has_scales_for_more_rows_than_a_step_has() -> None:
    """vLLM's CUTLASS kernels for NVFP4 make scales of 163,840 rows for each chosen expert."""
    setup = settings(GEMMA, "0.20.2", "rtx-5090")
    mixer, few = experts(setup.model), 16
    room = experts_room(mixer, setup.rank, few, 2, setup.rules, function="gelu_pytorch_tanh")
    scales = 163_840 * 8 * 2816 // 16
    assert scales < room.inside < scales + 10 * MIB
    # gate and up twice, and once more, for each row
    assert room.kept == few * 8 * 2 * (2 * 2 * 704 + 2 * 704)


def test_a_log_of_cutlass_experts_has_what_they_take() -> None:
    """unseen-0052: a step of 16,384 tokens; without workspaces 2.8 GiB too many for the cache."""
    row = next(one for one in read_served(UNSEEN) if one.id == "unseen-0052")
    error = judge(row).error("kv_gib")
    assert error is not None
    assert abs(error) < 0.1


@pytest.mark.parametrize(
    ("gpu", "options", "attends"),
    [
        ("rtx-5090", {"kv_cache_dtype": "fp8"}, True),
        ("rtx-5090", {}, False),
        ("rtx-3090", {"kv_cache_dtype": "fp8_e5m2"}, True),
        ("h100-sxm-80gb", {"kv_cache_dtype": "fp8"}, False),
        ("b200", {}, True),
        ("t4", {}, True),
        ("rtx-5090", {"attention_backend": "FLASHINFER"}, True),
        ("b200", {"attention_backend": "flash_attn"}, False),
    ],
)
def test_flashinfer_attends_where_flash_attention_does_not(
    gpu: str, options: dict[str, object], attends: bool
) -> None:
    assert flashinfer_attends(settings("Qwen/Qwen3-8B", "0.20.2", gpu, **options)) is attends


def test_heads_that_flashinfer_has_not_go_to_triton() -> None:
    """Gemma 4's global layers have heads of 512."""
    assert not flashinfer_attends(settings(GEMMA, "0.20.2", "rtx-5090", kv_cache_dtype="fp8"))


def test_graphs_have_flashinfer_s_workspace_unless_tokens_are_guessed() -> None:
    draft = {"method": "mtp", "num_speculative_tokens": 2}
    without = settings(QWEN, "0.24.0", "rtx-5090", kv_cache_dtype="auto", max_num_seqs=1)
    plain = replace(without, kv_dtype="auto")
    eighth = replace(without, kv_dtype="fp8")
    assert graph_bytes(eighth) - graph_bytes(plain) == FLASHINFER_BUFFER == 414 * MIB
    guessing = settings(
        QWEN, "0.24.0", "rtx-5090", kv_cache_dtype="fp8", max_num_seqs=8, speculative_config=draft
    )
    # the log of unseen-0053, whose attention is FlashInfer's, has graphs in pieces alone
    assert captured(guessing) == 9
    assert graph_bytes(guessing) < 100 * MIB


def test_an_answer_with_workspaces_says_less_cache() -> None:
    engine = find_engine("vllm")
    old, new = (
        engine.answer(question(PLAIN, version, "h100-sxm-80gb")) for version in ("0.13.0", "0.14.1")
    )
    assert old.figures["kv_tokens"] - new.figures["kv_tokens"] == pytest.approx(
        512 * MIB / 98304, abs=300
    )
