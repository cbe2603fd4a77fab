"""What kernels hold that a shape does not tell: saved statistics and workspaces, a row each, as
plain functions of integers.

No framework is imported here; `lower` and `trace` use the same rows. Sizes are bytes as requested,
before rounding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from memfit.lazy_dataclass import dataclass
from memfit.registry import Registry

MiB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A fact about a kernel: what it allocates, for which versions of torch it was read, and
    where."""

    name: str
    holds: str
    versions: str
    cite: str
    life: str = "op"  # `op`: until the op returns; `saved`: until its backward; `process`


KERNELS: Registry[Row] = Registry("kernel")


def _row(name: str, holds: str, versions: str, cite: str, life: str = "op") -> None:
    KERNELS.add(name, Row(name=name, holds=holds, versions=versions, cite=cite, life=life))


def up(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple."""
    return -(-count // multiple) * multiple


# -- cuBLAS
# --------------------------------------------------------------------------------------------------

_row(
    "cublas_workspace",
    "32 MiB on major 9, 10 and 12, else 8.125 MiB, per thread that multiplies",
    "torch 2.13",
    "aten/src/ATen/cuda/CublasHandlePool.cpp",
    "process",
)


def cublas_workspace(capability: tuple[int, int] = (8, 0), torch: tuple[int, int] = (2, 13)) -> int:
    """Bytes of one cuBLAS workspace; the forward thread and the autograd thread have one each.

    Older versions (before about 2.11) give 32 MiB to sm_90 alone.
    """
    large = capability[0] in (9, 10, 12) if torch >= (2, 11) else capability == (9, 0)
    return 32 * MiB if large else 4096 * 1024 * 2 + 16 * 1024 * 8


_row(
    "cublaslt_workspace",
    "1 MiB per call up to 2.8, kept per thread in 2.9 and 2.10, shared with cuBLAS from 2.11",
    "torch 2.1 .. 2.13",
    "aten/src/ATen/cuda/CUDABlas.cpp; CublasHandlePool.cpp",
)


def cublaslt_workspace(torch: tuple[int, int] = (2, 13)) -> int:
    """Bytes that an addmm with a bias epilogue allocates in addition to the cuBLAS workspace."""
    return MiB if torch < (2, 11) else 0


# -- attention
# --------------------------------------------------------------------------------------------------

_row(
    "flash_forward",
    "log-sum-exp [B, N, S] fp32; two random-state tensors on the GPU",
    "torch 2.7 .. 2.13",
    "ATen/native/transformers/cuda/flash_attn/flash_api.cpp",
    "saved",
)


def flash_lse(batch: int, heads: int, query: int) -> int:
    """Saved log-sum-exp of the dense flash kernel; the length is not rounded."""
    return batch * heads * query * 4


_row(
    "flash_split",
    "fp32 partial outputs and statistics when keys are split",
    "torch 2.1 .. 2.13",
    "flash_attn/flash_api.cpp set_params_splitkv",
)


@lru_cache(maxsize=1024)  # every layer asks the same
def flash_splits(batch: int, heads: int, query: int, key: int, head: int, sms: int = 108) -> int:
    """How many pieces the keys are split into when there is no dropout: 1 when the blocks fill the
    GPU."""
    block = 256 if head <= 64 else 128 if head <= 128 else 64
    pieces, blocks = up(key, block) // block, batch * heads * (up(query, 64) // 64)
    room = sms * 2
    if blocks >= 0.8 * room:
        return 1
    most = min(128, room, pieces)

    def eligible(count: int) -> bool:
        return count == 1 or -(-pieces // count) != -(-pieces // (count - 1))

    def efficiency(count: int) -> float:
        waves = blocks * count / room
        return waves / -(-waves // 1)

    best = max((efficiency(count) for count in range(1, most + 1) if eligible(count)), default=0.0)
    return next(
        (
            count
            for count in range(1, most + 1)
            if eligible(count) and efficiency(count) >= 0.85 * best
        ),
        1,
    )


def flash_split_buffers(
    batch: int, heads: int, query: int, key: int, head: int, sms: int = 108
) -> tuple[int, int]:
    """Partial statistics and partial outputs of the split kernel; (0, 0) when it does not split."""
    splits = flash_splits(batch, heads, query, key, head, sms)
    if splits <= 1:
        return 0, 0
    rows = splits * batch * heads * query * 4
    return rows, rows * up(up(head, 8), 32)


_row(
    "flash_backward",
    "softmax_d, dq_accum in fp32, and for grouped queries dk and dv at the query heads",
    "torch 2.1 .. 2.13",
    "flash_attn/flash_api.cpp mha_bwd",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashBackward:
    """Buffers of one flash backward call, all alive together with dq, dk and dv."""

    softmax_d: int
    dq_accum: int
    dk_expanded: int
    dv_expanded: int

    @property
    def total(self) -> int:
        return self.softmax_d + self.dq_accum + self.dk_expanded + self.dv_expanded


def flash_backward(
    batch: int,
    heads: int,
    kv_heads: int,
    query: int,
    key: int,
    head: int,
    element: int = 2,
    splits: int = 1,
) -> FlashBackward:
    """Rounded to 128 queries and 32 values of the head; `splits` > 1 only with deterministic
    algorithms."""
    rounded, head8 = up(query, 128), up(head, 8)
    expanded = batch * key * heads * head8 * element if heads != kv_heads else 0
    return FlashBackward(
        softmax_d=batch * heads * rounded * 4,
        dq_accum=splits * batch * rounded * heads * up(head8, 32) * 4,
        dk_expanded=expanded,
        dv_expanded=expanded,
    )


_row(
    "flash_attn_2",
    (
        "the flash-attn package: as torch's copy, the head rounded to 64 above 128, lengths "
        "unpadded with padding, two integers of random state always"
    ),
    "flash-attn 2.6 .. 2.8",
    (
        "flash-attn v2.8.3 csrc/flash_attn/flash_api.cpp mha_bwd, mha_varlen_bwd; "
        "flash_attn/flash_attn_interface.py"
    ),
)


def flash_attn_2_backward(
    batch: int,
    heads: int,
    kv_heads: int,
    query: int,
    key: int,
    head: int,
    element: int = 2,
    real: int = 0,
) -> FlashBackward:
    """`real`: tokens of the whole batch once padding is taken out (the variable-length kernels); 0
    for the dense ones."""
    head8 = up(head, 8)
    rounded = up(head8, 32 if head8 <= 128 else 64)
    rows = real + 128 * batch if real else batch * up(query, 128)
    expanded = (real or batch * key) * heads * head8 * element if heads != kv_heads else 0
    return FlashBackward(
        softmax_d=rows * heads * 4,
        dq_accum=rows * heads * rounded * 4,
        dk_expanded=expanded,
        dv_expanded=expanded,
    )


_row(
    "flash_attn_3",
    (
        "backward: two row statistics and dq in fp32, for grouped queries dk and dv in fp32 "
        "at the kv heads, semaphores; forward one semaphore"
    ),
    "flash-attn 3 (hopper)",
    "flash-attn hopper/flash_api.cpp mha_bwd at 0251105a",
)


def flash_attn_3_backward(
    batch: int,
    heads: int,
    kv_heads: int,
    query: int,
    key: int,
    head: int,
    *,
    real: int = 0,
    hopper: bool = True,
) -> tuple[int, ...]:
    """softmax_d, lse_log2, dq, dk and dv accumulators, then the semaphores; causal, without
    softcap. Heads go up to 64, 96, 128, 192 or 256."""
    wide = next(size for size in (64, 96, 128, 192, 256) if head <= size)
    rows = 128 if wide <= 64 else 64
    columns = (
        128 if wide <= 128 else (96 if hopper else 80) if wide <= 192 else (80 if hopper else 64)
    )
    queries = up(real + batch * rows, rows) if real else batch * up(query, rows)
    keys = up(real + batch * columns, columns) if real else batch * up(key, columns)
    grouped = keys * kv_heads * wide * 4 if heads != kv_heads else 0
    statistics = queries * heads * 4
    return (
        statistics,
        statistics,
        queries * heads * wide * 4,
        grouped,
        grouped,
        -(-query // rows) * batch * heads * 4,
    )


_row(
    "efficient_forward",
    "log-sum-exp with the length rounded to 32; an fp32 accumulator for heads above 128",
    "torch 2.1 .. 2.13",
    "ATen/native/transformers/cuda/attention.cu",
    "saved",
)


def efficient_lse(batch: int, heads: int, query: int) -> int:
    return batch * heads * up(query, 32) * 4


def efficient_accumulator(
    batch: int, heads: int, query: int, head: int, value_head: int, element: int
) -> int:
    """The fp32 output accumulator of the 16-bit kernels with large heads."""
    return (
        batch * query * heads * value_head * 4
        if element == 2 and max(head, value_head) > 128
        else 0
    )


_row(
    "efficient_backward",
    "delta [B, N, S] fp32 and one workspace of gradient tiles",
    "torch 2.1 .. 2.13",
    "mem_eff_attention/kernel_backward.h",
)


def efficient_backward(
    batch: int,
    heads: int,
    query: int,
    key: int,
    head: int,
    value_head: int,
    element: int = 2,
    capability: tuple[int, int] = (8, 0),
) -> int:
    """Delta plus the workspace of the tile that the kernel picks by head size and shared memory."""
    largest = max(head, value_head)
    small = capability in ((8, 6), (8, 9), (12, 0))
    if element == 4:
        rows, columns, registers = (
            (64, 64, True) if largest <= 64 or small or largest > 128 else (128, 64, True)
        )
        delta = batch * query * heads * value_head * 4 + batch * heads * query * 4
    else:
        delta = batch * heads * query * 4
        if largest <= 64:
            rows, columns, registers = 64, 64, True
        elif largest <= 96 and small:
            rows, columns, registers = 128, 64, True
        elif largest <= 128 and not small:
            rows, columns, registers = 128, 128, True
        else:
            rows, columns, registers = (64, 64, False) if small else (128, 64, False)
    tiles = -(-query // rows) * -(-head // columns) * (4 + rows * columns)
    kept = 0
    if not registers and element == 2:
        pieces = max(1, min(-(-key // columns), 200 // (batch * heads)))
        pieces = 1 if batch * heads >= 256 and key <= 2 * columns else pieces
        kept = pieces * columns * (up(head, rows) + up(value_head, rows))
    return delta + 4 * batch * heads * up(tiles + kept, 4)


_row(
    "cpu_flash",
    "one tile of scores, row statistics and an output tile per thread",
    "torch 2.13",
    "ATen/native/cpu/FlashAttentionKernel.cpp; checked against the profiler",
)


def cpu_flash(query: int, key: int, head: int, threads: int, element: int = 4) -> int:
    """Buffer of the CPU's flash forward in fp32, for checks of a trace against real steps on the
    CPU. In 16 bits, the scores are also kept in that dtype, in half the bytes of the backward's."""
    rows = min(256 if query >= 768 else 64 if query >= 192 else 32, query)
    columns = min(512, key)
    return threads * rows * (columns + 2 + head) * element


def cpu_flash_backward(query: int, key: int, threads: int, element: int = 4) -> int:
    rows = min(256 if query >= 768 else 64 if query >= 192 else 32, query)
    return threads * 2 * rows * min(512, key) * element


_row(
    "cudnn",
    (
        "log-sum-exp fp32 and two 64-bit random-state scalars on the GPU; backward an fp32 "
        "dq and row sums, the plan's own workspace is not known"
    ),
    "torch 2.5 .. 2.13",
    (
        "ATen/native/cudnn/MHA.cpp; cudnn-frontend node/scaled_dot_product_flash_attention.h "
        "get_fe_workspace_size_node"
    ),
    "saved",
)


def cudnn_backward(batch: int, heads: int, query: int, head: int) -> int:
    """One workspace in addition to dq, dk and dv: fp32 accumulators of dq and of a sum a row; what
    the chosen plan adds is not known."""
    return batch * heads * query * (head + 1) * 4


_row(
    "sdpa_choice",
    (
        "flash, efficient, math; cuDNN first on Hopper and Blackwell from torch 2.11 (whose "
        "bundled cuDNN is above 9.15)"
    ),
    "torch 2.5.1 .. 2.13",
    "ATen/native/transformers/cuda/sdp_utils.cpp; ATen/Context.h",
    "saved",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SdpaCall:
    """One call of `scaled_dot_product_attention` on CUDA. `half`: fp16 or bf16. `grouped`:
    enable_gqa with fewer kv heads."""

    element: int
    half: bool
    head: int
    value_head: int
    masked: bool
    causal: bool
    query: int
    key: int
    grouped: bool = False
    training: bool = True
    dropout: float = 0.0
    capability: tuple[int, int] = (8, 0)
    torch: tuple[int, int] = (2, 13)
    allowed: tuple[str, ...] = ("flash", "efficient", "math")

    @property
    def consumer(self) -> bool:
        """GPUs with little shared memory per multiprocessor."""
        return self.capability in ((8, 6), (8, 9), (12, 0))

    def cudnn(self) -> bool:
        fits = (
            self.head % 8 == 0
            and self.value_head % 8 == 0
            and max(self.head, self.value_head) <= 128
            and self.key > 1
        )
        return "cudnn" in self.allowed and self.half and fits and self.capability >= (8, 0)

    def flash(self) -> bool:
        refused = (
            self.consumer
            and self.training
            and (192 < self.head <= 224 or (self.head > 224 and self.dropout > 0))
        )
        square = not self.causal or self.query == self.key
        alike = self.head == self.value_head and self.head <= 256
        return (
            "flash" in self.allowed
            and self.half
            and not self.masked
            and alike
            and self.capability >= (8, 0)
            and square
            and not refused
        )

    def efficient(self) -> bool:
        step = 8 if self.half else 4
        aligned = self.head % step == 0 and self.value_head % step == 0
        return (
            "efficient" in self.allowed
            and self.element <= 4
            and aligned
            and not self.grouped
            and self.capability >= (5, 0)
        )

    @property
    def backend(self) -> str:
        first = self.capability[0] in (9, 10) and self.torch >= (2, 11)
        if first and self.cudnn():
            return "cudnn"
        if self.flash():
            return "flash"
        if self.efficient():
            return "efficient"
        return "math" if "math" in self.allowed or not self.cudnn() else "cudnn"


def sdpa_backend(**call: Any) -> str:
    """The kernel that the call described by the fields of `SdpaCall` takes."""
    return SdpaCall(**call).backend


# -- norms, embeddings, reductions, sorting
# -----------------------------------------------------------------------------

_row(
    "rms_norm",
    "fp32 reciprocal root per row, saved (fused kernel from 2.9)",
    "torch 2.9 .. 2.13",
    "ATen/native/cuda/layer_norm_kernel.cu",
    "saved",
)
_row(
    "layer_norm_backward",
    "partial sums of the gradients of weight and bias for many rows of few values",
    "torch 2.7 .. 2.13",
    "ATen/native/cuda/layer_norm_kernel.cu",
)


def norm_backward(
    rows: int, width: int, element: int, sms: int = 108, torch: tuple[int, int] = (2, 13)
) -> int:
    """One partial buffer (weight or bias gradient); zero unless rows > 65536 and the width is small
    for the GPU. None in torch 2.6."""
    if rows <= 65536 or width // 32 >= sms // 2 or torch < (2, 7):
        return 0
    return min(-(-rows // 32), 32768 // -(-width // 32)) * width * element


_row(
    "embedding_backward",
    "sorted and original indices, segment offsets and fp32 partial sums, for more than 3072 tokens",
    "torch 2.6 .. 2.13",
    "ATen/native/cuda/EmbeddingBackwardKernel.cu",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingBackward:
    """Buffers of the sorted path: while sorting, and while summing the segments (the indices stay
    through both)."""

    indices: int
    sorting: int
    summing: int

    @property
    def total(self) -> int:
        return self.indices + max(self.sorting, self.summing)


def embedding_backward(
    tokens: int, vocabulary: int, width: int, index: int = 8
) -> EmbeddingBackward:
    """Zero up to 3072 tokens. The radix sort's scratch (two alternate buffers) is inferred, not
    read."""
    if tokens <= 3072:
        return EmbeddingBackward(indices=0, sorting=0, summing=0)
    segments = min(tokens, vocabulary)
    partial = tokens // 10 + segments
    return EmbeddingBackward(
        indices=2 * index * tokens,
        sorting=index * tokens + 2 * index * tokens,
        summing=index * tokens + 2 * index * segments + index * partial + partial * width * 4,
    )


_row(
    "index_put_accumulate",
    "linear, sorted and original indices and their count, 8 bytes each",
    "torch 2.6 .. 2.13",
    "ATen/native/cuda/Indexing.cu",
)


def index_put_accumulate(count: int) -> int:
    return 4 * 8 * count


_row(
    "column_sum",
    (
        "what blocks of threads put by where they share the sum of a column: 128 places for "
        "each of theirs"
    ),
    "torch 2.4 .. 2.13",
    "ATen/native/cuda/Reduce.cuh setReduceConfig, global_memory_size",
)
THREADS = {
    (7, 5): 1024,
    (8, 6): 1536,
    (8, 7): 1536,
    (8, 9): 1536,
    (12, 0): 1536,
    (12, 1): 1536,
}  # of a multiprocessor; others 2048


def last_power(count: int) -> int:
    """The largest power of two up to `count`."""
    return 1 << (max(count, 1).bit_length() - 1)


@lru_cache(maxsize=1024)  # every layer asks the same
def column_sum(
    rows: int, columns: int, sms: int = 108, capability: tuple[int, int] = (8, 0)
) -> tuple[int, int]:
    """Two buffers of a sum over the rows of a matrix, fp32 inside: partial sums and a counter for
    each group of columns; (0, 0) where a block sums all of its columns alone. A matrix of 2 GiB and
    more (in fp32) is summed in halves."""
    while rows * columns >= 2**29:
        rows = -(-rows // 2)
    wide = next(size for size in (4, 2, 1) if columns % size == 0)
    most = 512 // wide
    height = min(last_power(rows), most // min(last_power(columns // wide), 32))
    width = min(last_power(columns // wide), most // height)
    if rows < min(height * 16, 256) or -(-rows // height) < 256:
        return 0, 0
    each, grid = -(-rows // height), -(-columns // (wide * width))
    room = sms * (THREADS.get(capability, 2048) // (width * height))
    shares = max(min(-(-room // grid), -(-each // 16)), -(-each // 256)) if grid <= room else 1
    return (4 * columns * shares * width * wide, 4 * grid) if shares > 1 else (0, 0)


_row(
    "foreach_norm",
    "one fp32 value per chunk of 65536 elements and tensor",
    "torch 2.6 .. 2.13",
    "ATen/native/cuda/ForeachReduceOp.cu",
)


def foreach_norm(sizes: tuple[int, ...]) -> int:
    return len(sizes) * max((-(-size // 65536) for size in sizes), default=0) * 4


_row(
    "sort",
    "index pairs and radix scratch, by number of rows",
    "torch 2.6 .. 2.13",
    "ATen/native/cuda/SortStable.cu",
)


def sort_buffers(rows: int, length: int, element: int) -> int:
    """Temporary buffers of a sort, without values and indices; the radix part is inferred."""
    count = rows * length
    if length <= 4096 and rows > 1:
        return 0
    if rows == 1 or length >= 1_000_000:
        return 8 * length + length * (element + 8)
    return 16 * count + count * element if rows < 128 else 8 * count + count * (element + 8)
