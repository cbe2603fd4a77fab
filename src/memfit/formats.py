"""Number formats, a row each: how many bytes `n` values take, and which math they run in."""

from __future__ import annotations

from memfit.lazy_dataclass import dataclass
from memfit.registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """`block` values are stored in `block_bytes` bytes; `math` names the arithmetic rate they run
    at. `apart`: bytes of each block that lie in tensors of their own beside the values, one number
    a tensor. `index`: bytes for each input of a linear layer in one more tensor."""

    name: str
    block: int = 1
    block_bytes: int
    math: str
    cite: str = "IEEE 754 / vendor documentation"
    apart: tuple[int, ...] = ()
    index: int = 0

    def bytes(self, count: int) -> int:
        """Bytes of `count` values; the last block counts in full."""
        return -(-count // self.block) * self.block_bytes

    def tensors(self, count: int, width: int) -> tuple[int, ...]:
        """Bytes of each tensor that a weight of `count` values and `width` inputs is stored in,
        the values first."""
        blocks = -(-count // self.block)
        values = blocks * (self.block_bytes - sum(self.apart))
        beside = [blocks * bytes for bytes in self.apart]
        return (values, *beside, *([width * self.index] if self.index else []))

    @property
    def bits(self) -> float:
        return 8 * self.block_bytes / self.block


FORMATS: Registry[Format] = Registry("dtype")


def _row(
    name: str,
    block_bytes: int,
    math: str,
    *aliases: str,
    block: int = 1,
    cite: str = "IEEE 754 / vendor documentation",
    apart: tuple[int, ...] = (),
    index: int = 0,
) -> Format:
    row = Format(
        name=name,
        block=block,
        block_bytes=block_bytes,
        math=math,
        cite=cite,
        apart=apart,
        index=index,
    )
    return FORMATS.add(name, row, *aliases)


FP64 = _row("float64", 8, "fp64", "fp64", "double", "F64")
FP32 = _row("float32", 4, "fp32", "fp32", "float", "F32")
BF16 = _row("bfloat16", 2, "bf16", "bf16")
FP16 = _row("float16", 2, "fp16", "fp16", "half", "F16")
FP8 = _row("float8_e4m3fn", 1, "fp8", "fp8", "F8_E4M3")
FP8_E5M2 = _row("float8_e5m2", 1, "fp8", "F8_E5M2")
FP8_E8M0 = _row("float8_e8m0fnu", 1, "fp8", "F8_E8M0")
MXFP4 = _row(
    "mxfp4",
    17,
    "fp4",
    block=32,
    apart=(1,),
    cite="OCP Microscaling Formats v1.0, 5.2: 32 values of 4 bits share a scale of 8 bits",
)
FP8_BLOCK = _row(
    "fp8-block128",
    128 * 128 + 4,
    "fp8",
    block=128 * 128,
    apart=(4,),
    cite="transformers 5.23 integrations/finegrained_fp8.py: an fp32 scale for 128 × 128 values",
)
NVFP4 = _row(
    "nvfp4",
    9,
    "fp4",
    block=16,
    apart=(1,),
    cite=(
        "modelopt 0.29 quantization/qtensor/nvfp4_tensor.py: 16 values of 4 bits share a "
        "scale of 8 bits"
    ),
)
_row(
    "mxfp8",
    33,
    "fp8",
    block=32,
    apart=(1,),
    cite="OCP Microscaling Formats v1.0, 5.1: 32 values of 8 bits share a scale of 8 bits",
)
for _size in (32, 64, 128):
    _row(
        f"int4-g{_size}",
        _size // 2 + 2,
        "int4",
        block=_size,
        apart=(2,),
        cite="compressed-tensors 0.12 compressors/pack_quantized: 8 values of 4 bits in an int32, "
        "a 16-bit scale for each group, no zero points where symmetric",
    )

# Of two groups: two scales of 16 bits and two zero points of 4, in tensors of their own (`qweight`,
# `qzeros`, `scales`; AutoGPTQ 0.7 nn_modules/qlinear/qlinear_exllama.py, AutoAWQ 0.2.6
# awq/modules/linear/gemm.py). GPTQ keeps the group of each input in int32, too (`g_idx`).
SCALES_AND_ZEROS = (1, 4)
INDEX = 4
for _method in ("gptq", "awq"):
    for _group in (
        128,
        64,
        32,
    ):  # 4 bits a value; per group a scale of 16 bits and a zero point of 4
        _row(
            f"{_method}-4bit-g{_group}",
            _group + 5,
            "int4",
            block=2 * _group,
            apart=SCALES_AND_ZEROS,
            index=INDEX if _method == "gptq" else 0,
            cite="transformers 5.23 quantizers; AutoGPTQ qlinear, AutoAWQ gemm layouts",
        )
for _group in (128, 64, 32):  # a byte a value; per group a scale of 16 bits and a zero point of 8
    _row(
        f"gptq-8bit-g{_group}",
        _group + 3,
        "int8",
        block=_group,
        apart=(2, 1),
        index=INDEX,
        cite="AutoGPTQ 0.7 nn_modules/qlinear/qlinear_cuda_old.py",
    )
# inputs of the narrowest layers that are stored in one group each; wider ones hold up to 0.1 %
# less than is said
NARROWEST = 4096
_ONE_GROUP = (
    "AutoGPTQ 0.7 nn_modules/qlinear/qlinear_cuda_old.py: group_size -1 is all inputs of an output"
)
_row(
    "gptq-4bit-gall",
    NARROWEST + 5,
    "int4",
    block=2 * NARROWEST,
    apart=SCALES_AND_ZEROS,
    index=INDEX,
    cite=_ONE_GROUP,
)
_row(
    "gptq-8bit-gall",
    NARROWEST + 3,
    "int8",
    block=NARROWEST,
    apart=(2, 1),
    index=INDEX,
    cite=_ONE_GROUP,
)
COMPLEX64 = _row("complex64", 8, "fp32", "C64")
INT64 = _row("int64", 8, "int64", "long", "I64")
INT32 = _row("int32", 4, "int32", "int", "I32")
INT16 = _row("int16", 2, "int16", "short", "I16")
INT8 = _row("int8", 1, "int8", "I8")
UINT64 = _row("uint64", 8, "int64", "U64")
UINT32 = _row("uint32", 4, "int32", "U32")
UINT16 = _row("uint16", 2, "int16", "U16")
UINT8 = _row("uint8", 1, "int8", "U8")
BOOL = _row("bool", 1, "int8")
