"""The tensor types of GGUF files, a row each: how many values make a block, and how many bytes a
block takes."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.lazy_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GgmlType:
    """`name` is ggml's, or the row of memfit.formats where the type is a plain number."""

    name: str
    block: int
    block_bytes: int

    def bytes(self, count: int) -> int:
        return count // self.block * self.block_bytes


def _rows(*rows: tuple[int, str, int, int]) -> Mapping[int, GgmlType]:
    return {
        code: GgmlType(name=name, block=block, block_bytes=size) for code, name, block, size in rows
    }


# Codes: `enum ggml_type` in ggml/include/ggml.h. Bytes: the `static_assert(sizeof(block_…))` lines
# of ggml/src/ggml-common.h, QK_K = 256; `gguf.constants.GGML_QUANT_SIZES` (gguf 0.19) says the same
# and a test compares. Q2_0 is newer than that package: llama.cpp b11192, `block_q2_0 { ggml_half d;
# uint8_t qs[16]; }`, 64 values. A fork writes 128 values and 34 bytes under the same code; its
# tensors then do not fill their places, and the file is refused.
GGML_TYPES: Mapping[int, GgmlType] = _rows(
    (0, "float32", 1, 4),
    (1, "float16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "int8", 1, 1),
    (25, "int16", 1, 2),
    (26, "int32", 1, 4),
    (27, "int64", 1, 8),
    (28, "float64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "bfloat16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
)
# Once in the enumeration, taken out again; a file that has them wants to be quantized anew.
REMOVED: Mapping[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
