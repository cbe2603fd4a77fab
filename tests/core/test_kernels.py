"""Hidden buffers of kernels: worked by hand from the sources that the rows cite, and against
published measurements."""

from __future__ import annotations

import pytest

from memfit import kernels

MiB = 1 << 20


def test_every_row_says_what_for_which_versions_and_where() -> None:
    for row in kernels.KERNELS.values():
        assert row.holds
        assert any(letter.isdigit() for letter in row.versions)
        assert row.cite
        assert row.life in ("op", "saved", "process")


@pytest.mark.parametrize(
    ("capability", "version", "size"),
    [
        ((8, 0), (2, 13), 8_519_680),
        ((8, 9), (2, 6), 8_519_680),
        ((9, 0), (2, 6), 32 * MiB),
        ((12, 0), (2, 6), 8_519_680),
        ((12, 0), (2, 13), 32 * MiB),
        ((10, 0), (2, 13), 32 * MiB),
    ],
)
def test_cublas_workspace(capability: tuple[int, int], version: tuple[int, int], size: int) -> None:
    assert kernels.cublas_workspace(capability, version) == size


def test_cublaslt_workspace_is_shared_in_new_versions() -> None:
    assert kernels.cublaslt_workspace((2, 6)) == MiB
    assert kernels.cublaslt_workspace((2, 13)) == 0


def test_flash_backward_of_a_llama_layer() -> None:
    held = kernels.flash_backward(1, 32, 8, 2048, 2048, 128)
    q = 2048 * 32 * 128 * 2
    assert held.dq_accum == 2 * q  # fp32 beside bf16
    assert held.softmax_d == 32 * 2048 * 4
    assert held.dk_expanded == held.dv_expanded == q  # at the query heads
    assert held.total == 4 * q + 32 * 2048 * 4


def test_flash_backward_rounds_queries_to_128_and_heads_to_32() -> None:
    held = kernels.flash_backward(1, 1, 1, 129, 129, 80)
    assert held.dq_accum == 256 * 96 * 4
    assert held.softmax_d == 256 * 4
    assert held.dk_expanded == 0  # no grouping


def test_keys_are_split_only_where_the_gpu_would_idle() -> None:
    assert kernels.flash_splits(8, 32, 2048, 2048, 128) == 1
    splits = kernels.flash_splits(1, 8, 4, 8192, 128)
    assert splits > 1
    assert kernels.flash_split_buffers(1, 8, 4, 8192, 128) == (
        splits * 8 * 4 * 4,
        splits * 8 * 4 * 4 * 128,
    )
    assert kernels.flash_split_buffers(8, 32, 2048, 2048, 128) == (0, 0)


def test_efficient_attention_statistics() -> None:
    assert kernels.efficient_lse(1, 2, 33) == 2 * 64 * 4
    assert kernels.efficient_accumulator(1, 2, 10, 160, 160, 2) == 10 * 2 * 160 * 4
    assert kernels.efficient_accumulator(1, 2, 10, 128, 128, 2) == 0


def test_efficient_backward_holds_about_one_fp32_dq() -> None:
    dq = 4 * 32 * 2048 * 128
    assert dq < kernels.efficient_backward(1, 32, 2048, 2048, 128, 128) < 1.05 * dq
    tiles, kept = (
        32 * 2 * (4 + 64 * 64),
        6 * 64 * (128 + 128),
    )  # 64 x 64 tiles leave dk and dv out of the registers: 200 // 32 pieces
    delta = 32 * 2048 * 4
    assert (
        kernels.efficient_backward(1, 32, 2048, 2048, 128, 128, capability=(8, 9))
        == 32 * 4 * (tiles + kept) + delta
    )


CALL = {
    "element": 2,
    "half": True,
    "head": 128,
    "value_head": 128,
    "masked": False,
    "causal": True,
    "query": 512,
    "key": 512,
}


@pytest.mark.parametrize(
    ("change", "backend"),
    [
        ({}, "flash"),
        ({"grouped": True}, "flash"),
        ({"masked": True, "causal": False}, "efficient"),
        ({"masked": True, "causal": False, "grouped": True}, "math"),
        ({"key": 600}, "efficient"),
        ({"element": 4, "half": False}, "efficient"),
        ({"element": 4, "half": False, "grouped": True}, "math"),
        ({"value_head": 64}, "efficient"),
        ({"head": 320, "value_head": 320}, "efficient"),
        ({"head": 30, "value_head": 32, "masked": True}, "math"),
        ({"capability": (7, 5)}, "efficient"),
        ({"head": 208, "value_head": 208, "capability": (8, 9)}, "efficient"),
        ({"head": 208, "value_head": 208, "capability": (8, 9), "training": False}, "flash"),
        ({"capability": (9, 0), "allowed": ("flash", "efficient", "math", "cudnn")}, "cudnn"),
        (
            {
                "capability": (9, 0),
                "torch": (2, 6),
                "allowed": ("flash", "efficient", "math", "cudnn"),
            },
            "flash",
        ),
        ({"allowed": ("math",)}, "math"),
    ],
)
def test_which_attention_kernel_is_taken(change: dict[str, object], backend: str) -> None:
    assert kernels.sdpa_backend(**CALL | change) == backend


def test_embedding_backward_sorts_beyond_3072_tokens() -> None:
    assert kernels.embedding_backward(3072, 128256, 4096).total == 0
    held = kernels.embedding_backward(16384, 128256, 4096)
    partial = (16384 // 10 + 16384) * 4096 * 4
    assert partial == 295_272_448
    assert partial < held.total < partial + 2 * MiB


def test_norm_backward_has_partial_sums_for_many_short_rows() -> None:
    assert kernels.norm_backward(65536, 64, 2) == 0
    assert kernels.norm_backward(100_000, 4096, 2) == 0
    assert kernels.norm_backward(100_000, 64, 2) == 3125 * 64 * 2
    assert kernels.norm_backward(100_000, 64, 2, torch=(2, 6)) == 0


def test_foreach_norm_keeps_a_number_per_chunk() -> None:
    assert kernels.foreach_norm((65536, 65537, 1)) == 3 * 2 * 4
    assert kernels.foreach_norm(()) == 0


@pytest.mark.parametrize(
    ("rows", "columns", "sms", "capability", "mib"),
    [
        # What peaks of published runs hold beside tensors: Liger-Kernel's benchmarks of rms_norm
        # (A100) and fused_add_rms_norm (H100).
        (2048, 1024, 108, (8, 0), 16),
        (2048, 8192, 108, (8, 0), 108),
        (2048, 16384, 108, (8, 0), 112),
        (2048, 32768, 108, (8, 0), 112),
        (2048, 8192, 132, (9, 0), 128),
        (2048, 16384, 132, (9, 0), 136),
        (2048, 32768, 132, (9, 0), 144),
        (1000, 4096, 108, (8, 0), 0),
        (132, 4096, 132, (9, 0), 0),  # too few rows: each block sums its columns alone
    ],
)
def test_sums_over_rows_share_columns(
    rows: int, columns: int, sms: int, capability: tuple[int, int], mib: int
) -> None:
    shares, counters = kernels.column_sum(rows, columns, sms, capability)
    assert shares == mib * 2**20
    assert counters == (4 * columns // 128 if mib else 0)


def test_sums_over_odd_and_large_matrices() -> None:
    assert kernels.column_sum(8192, 4095)[0] > 0  # one column a thread
    assert kernels.column_sum(8192, 6)[0] < 2**20
    assert kernels.column_sum(2**20, 4096) == kernels.column_sum(2**16, 4096)  # in halves of halves
    assert (
        kernels.column_sum(8192, 4096, 84, (8, 6))[0] < kernels.column_sum(8192, 4096, 84)[0]
    )  # fewer threads at a time


def test_sort_and_scatter_scratch_grow_with_the_input() -> None:
    assert kernels.sort_buffers(8, 4096, 4) == 0
    assert kernels.sort_buffers(1, 10_000, 8) == 10_000 * 8 + 10_000 * 16
    assert kernels.sort_buffers(16, 10_000, 8) > kernels.sort_buffers(1, 10_000, 8)
    assert kernels.index_put_accumulate(1000) == 32_000
