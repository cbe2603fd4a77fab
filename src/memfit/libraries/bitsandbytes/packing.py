"""Quantized weights of bitsandbytes: how they are stored, and how they are made from 16-bit
weights."""

from __future__ import annotations

from memfit.formats import FORMATS, FP16, FP32, INT8, UINT8, Format
from memfit.lower.packing import Packed
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.model.modules import Linear
from memfit.program import Program

# values of a 4-bit weight that share a scale (bitsandbytes 0.50 nn/modules.py Params4bit, on CUDA)
BLOCK = 64
PLAIN = (0, 45)  # the first version that keeps int8 weights in rows
NESTED = 256  # scales that share one of their own (functional.py quantize_4bit)


def pack(r: Recorder, program: Program, linear: Linear, format: Format) -> Packed:
    """A weight as bitsandbytes stores it; the whole one is on the GPU until its packed form is made
    (transformers 5.23 integrations/bitsandbytes.py Bnb4bitQuantize, Bnb8bitQuantize)."""
    assert program.quant is not None
    count = linear.inputs * linear.outputs
    if program.quant.again:
        return from_host(r, program, linear)
    if program.quant.format == "int8":
        straight = program.job.version("transformers") >= (
            5,
            0,
        )  # before, the weight came from the host
        arrived = (
            r.tensor((linear.outputs, linear.inputs), format, "load", "temporaries")
            if straight
            else None
        )
        return eight_bits(
            r, linear, format, arrived, by_columns=program.job.version("bitsandbytes") < PLAIN
        )
    arrived = r.tensor((linear.outputs, linear.inputs), format, "load", "temporaries")
    turned = (
        r.like(arrived, "contiguous", "temporaries")
        if linear.conv1d and program.job.version("transformers") >= (5, 0)
        else None
    )
    packed = four_bits(r, count, (linear.outputs, linear.inputs), format, program)
    del arrived, turned
    return packed


def from_host(r: Recorder, program: Program, linear: Linear) -> Packed:
    """The weight comes to the GPU in one format, is packed, and goes (lightning 2.6
    fabric/plugins/precision/bitsandbytes.py)."""
    assert program.quant is not None
    shape, format = (linear.outputs, linear.inputs), FORMATS[program.quant.again]
    if program.quant.format == "int8":
        return eight_bits(
            r, linear, format, None, by_columns=program.job.version("bitsandbytes") < PLAIN
        )
    arrived = r.tensor(shape, format, "to", "temporaries")
    packed = four_bits(r, linear.inputs * linear.outputs, shape, format, program)
    del arrived
    return packed


def four_bits(
    r: Recorder, count: int, shape: tuple[int, int], format: Format, program: Program
) -> Packed:
    """Two values a byte and an fp32 scale per block; `double`: the scales' mean is taken off, and
    they become bytes with scales of their own (bitsandbytes 0.50 functional.py quantize_4bit). From
    0.46 on every weight has its own code table for those."""
    assert program.quant is not None
    scales = r.tensor((-(-count // BLOCK),), FP32, "quantize", "weights")
    weight = r.tensor(((count + 1) // 2, 1), UINT8, "quantize", "weights")
    code = r.tensor((16,), FP32, "code", "weights")
    nested: tuple[Tensor, ...] = ()
    if program.quant.double:
        version = program.job.version("bitsandbytes")
        mean = r.tensor((1,), FP32, "mean", "weights")
        shifted = (
            r.tensor(scales.shape, FP32, "sub", "temporaries") if version >= (0, 46) else scales
        )
        second = r.tensor((-(-scales.count // NESTED),), FP32, "quantize", "weights")
        small = r.tensor(scales.shape, UINT8, "quantize", "weights")
        table = (r.tensor((256,), FP32, "code", "weights"),) if version >= (0, 46) else ()
        scales, nested = small, (mean, second, *table)
        del shifted
    return Packed(
        weight=weight, source=format, shape=shape, scales=scales, nested=nested, code=code
    )


def eight_bits(
    r: Recorder, linear: Linear, format: Format, arrived: Tensor | None, *, by_columns: bool = False
) -> Packed:
    """One byte a value and an fp32 scale a row, made from an fp16 copy (bitsandbytes 0.50
    nn/modules.py Int8Params._quantize). `by_columns`: older versions made the bytes once more,
    scaled by columns, and dropped those (0.43 functional.py double_quant)."""
    shape = (linear.outputs, linear.inputs)
    half = r.tensor(shape, FP16, "to", "temporaries")
    scales = r.tensor((linear.outputs,), FP32, "quantize", "weights")
    columns = (
        [
            r.tensor((linear.inputs,), FP32, "quantize", "temporaries"),
            r.tensor(shape, INT8, "quantize", "temporaries"),
        ]
        if by_columns
        else []
    )
    weight = r.tensor(shape, INT8, "quantize", "weights")
    del half, arrived, columns
    return Packed(weight=weight, source=format, shape=shape, scales=scales)


def unpacked(r: Recorder, packed: Packed, format: Format) -> Tensor:
    """`dequantize_4bit`, and a cast where another format is wanted: then both are there for a
    moment."""
    scales = unpacked_scales(r, packed)
    weight = r.tensor(packed.shape, packed.source, "dequantize_4bit", "temporaries")
    r.compute(
        "dequantize",
        0,
        packed.weight.count + weight.count * packed.source.block_bytes,
        packed.source.math,
    )
    del scales
    return (
        weight if format is packed.source else r.tensor(packed.shape, format, "to", "temporaries")
    )


def unpacked_scales(r: Recorder, packed: Packed) -> list[Tensor]:
    """Nested scales in fp32; others are so already."""
    return (
        [r.tensor(packed.scales.shape, FP32, "dequantize_blockwise", "temporaries")]
        if packed.nested
        else []
    )
