"""Linear layers whose checkpoint is stored quantized: what undoing it holds, forward and backward.
Such weights are never trained.

fp8 in blocks multiplies as it is, by inputs made fp8 for the occasion (transformers 5.23
integrations/finegrained_fp8.py FP8Linear). GPTQ and AWQ unpack the whole weight for many rows and
multiply packed for few: above 50 rows ExLlama's kernels (AutoGPTQ 0.7
autogptq_extension/exllama/cuda_func/q4_matmul.cu; the first ones into a buffer of their own), from
1024 on AutoAWQ's (0.2 awq/modules/linear/gemm.py); Triton's always unpack when gradients are
asked for (AutoGPTQ 0.7
nn_modules/triton_utils/dequant.py). ExLlama's know 4 bits alone: AutoGPTQ, which transformers
before 4.49 asks for, takes older kernels for 8, in fp32 up to 127 rows, and torch's own operations
beyond. Which kernels multiply 4 bits is a key of the checkpoint's `quantization_config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from memfit.formats import FP8, FP16, FP32, INT8, INT16, INT32, Format
from memfit.lower import ops
from memfit.lower.bound import BoundLinear
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.quantized import settings_in
from memfit.program import Program

FEW = {"gptq": 50, "awq": 1023}  # rows up to which the kernel takes the weight as it is packed
OLDER_ROWS = 127  # up to which AutoGPTQ's kernels of 8 bits take the weight as it is packed
GPTQMODEL = (
    4,
    49,
)  # the first transformers that takes GPTQModel in AutoGPTQ's place (quantizers/quantizer_gptq.py)
SORTED_ROWS = 2048  # AutoGPTQ 0.7 modeling/_const.py EXLLAMA_DEFAULT_MAX_INPUT_LENGTH
# AutoGPTQ 0.7 nn_modules/qlinear/qlinear_exllamav2.py scratch_space_fixed: rows, bytes of each part
SCRATCH_ROWS, SCRATCH_EXTRA = 2048 * 8, 128
FIRST, SECOND, OLDER = "exllama", "exllamav2", "cuda-old"
BLOCK = 128  # values of an input that share an fp8 scale


def autogptq_kernels(program: Program, weight: Tensor) -> str:
    """Which kernels of AutoGPTQ multiply by the weight, or nothing where others do: ExLlama's
    first ones for 4 bits, its second ones where `exllama_config` says so, older ones for 8 bits and
    where ExLlama is switched off (transformers 4.46 utils/quantization_config.py GPTQConfig,
    AutoGPTQ 0.7 utils/import_utils.py dynamically_import_QuantLinear)."""
    job, name = program.job, weight.format.name
    if not name.startswith("gptq") or job.version("transformers") >= GPTQMODEL:
        return ""
    if name.startswith("gptq-8bit"):
        return OLDER
    if job.training:
        return ""
    settings = settings_in(program.model.config)
    if settings.get("use_exllama", settings.get("disable_exllama") is not True) is False:
        return OLDER
    chosen = settings.get("exllama_config")
    return SECOND if isinstance(chosen, Mapping) and chosen.get("version") == 2 else FIRST


def exllama_buffers(r: Recorder, program: Program, weights: Iterable[Tensor]) -> list[Tensor]:
    """What ExLlama's kernels keep from loading on."""
    known: dict[str, list[tuple[int, ...]]] = {}
    for one in weights:
        known.setdefault(autogptq_kernels(program, one), []).append(one.shape)
    r.where = "exllama"
    return [
        *first_buffers(r, program, known.get(FIRST, ())),
        *second_buffers(r, known.get(SECOND, ())),
    ]


def first_buffers(
    r: Recorder, program: Program, shapes: Sequence[tuple[int, ...]]
) -> Iterator[Tensor]:
    """A block as large as the largest weight in fp16, into which weights are unpacked; where rows
    are sorted by the weights' groups (`desc_act`), one for the inputs, too (AutoGPTQ 0.7
    modeling/_utils.py autogptq_post_init)."""
    if not shapes:
        return
    yield r.tensor((1, max(prod(shape) for shape in shapes)), FP16, "temp_dq", "workspace")
    if settings_in(program.model.config).get("desc_act"):
        widest = max(max(shape) for shape in shapes)
        yield r.tensor((SORTED_ROWS, widest), FP16, "temp_state", "workspace")


def second_buffers(r: Recorder, shapes: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
    """One block for all weights: the largest sum of a weight in fp16 and of fp32 outputs for 8
    sequences of 2,048 tokens, which no kernel of GPTQ writes; and for each weight the order of its
    inputs and the inverse order (AutoGPTQ 0.7 nn_modules/qlinear/qlinear_exllamav2.py
    scratch_space_fixed, ext_make_q_matrix)."""
    if not shapes:
        return
    outputs = [SCRATCH_ROWS * shape[0] * FP32.block_bytes for shape in shapes]
    weights = [FP16.bytes(prod(shape)) for shape in shapes]
    size = max(map(sum, zip(outputs, weights, strict=True))) + 2 * SCRATCH_EXTRA
    yield r.tensor((size // FP16.block_bytes,), FP16, "scratch", "workspace")
    for shape in shapes:
        yield r.tensor((shape[-1],), INT16, "q_perm", "buffers")
        yield r.tensor((shape[-1],), INT16, "q_invperm", "buffers")


def is_stored(weight: Tensor) -> bool:
    """fp8 counts, though a value of it is a byte: nothing else multiplies by it."""
    return weight.format.block > 1 or weight.format.name.startswith("float8")


def forward(x: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
    r, weight = ctx.r, layer.weight
    if ctx.autocast is not None:
        x = ops.cast(r, x, ctx.autocast)
    rows, width = x.count // x.shape[-1], x.shape[-1]
    method = weight.format.name.partition("-")[0]
    held: tuple[Tensor, ...]
    read = weight.format.bytes(weight.count)
    kernels = autogptq_kernels(ctx.program, weight)
    if kernels == OLDER and not r.grad:
        return older(x, layer, ctx)
    if method in FEW:
        held = ()
        if rows > FEW[method] or (r.grad and x.needs):
            if kernels in (FIRST, SECOND):
                read = unpack(r, weight, x.format)
            else:
                shape = (layer.outputs, width)
                held = (r.tensor(shape, x.format, "dequantize", "temporaries"),)
    else:
        held = (
            r.tensor(x.shape, FP8, "quantize", "temporaries"),
            r.tensor((rows, -(-width // BLOCK)), FP32, "quantize", "temporaries"),
        )
    out = r.tensor((*x.shape[:-1], layer.outputs), x.format, "linear")
    r.compute(
        "linear",
        2 * rows * width * layer.outputs,
        (x.count + out.count) * x.format.block_bytes + read,
        x.format.math if method in FEW else FP8.math,
    )
    del held
    out = r.node("stored_linear", out, (x,), back_stored, extra=(x.shape, layer.outputs))
    return out if layer.bias is None else ops.add(r, out, layer.bias)


def unpack(r: Recorder, weight: Tensor, format: Format) -> int:
    """A kernel that writes the whole weight into a buffer that is there already, whence cuBLAS
    reads it (AutoGPTQ 0.7 autogptq_extension/exllama/cuda_func/q4_matmul.cu q4_matmul_recons_cuda).
    Returns the bytes of the whole weight."""
    packed, whole = weight.format.bytes(weight.count), format.bytes(weight.count)
    r.compute("unpack", 0, packed + whole, format.math)
    return whole


def older(x: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
    """For few rows the fp32 output is made first, input and scales are cast beside it; for many,
    bits are shifted into int32, taken as int16 or int8, and scaled (AutoGPTQ 0.7
    nn_modules/qlinear/qlinear_cuda_old.py QuantLinear.forward)."""
    r, weight = ctx.r, layer.weight
    rows, width = x.count // x.shape[-1], x.shape[-1]
    shape, flops = (*x.shape[:-1], layer.outputs), 2 * rows * width * layer.outputs
    stored = weight.format.bytes(weight.count)
    if rows <= OLDER_ROWS:
        out = r.tensor(shape, FP32, "zeros", "temporaries")
        wide = r.tensor(x.shape, FP32, "to", "temporaries")
        group = settings_in(ctx.program.model.config).get("group_size", -1)
        groups = -(-width // group) if group > 0 else 1
        scales = r.tensor((groups, layer.outputs), FP32, "to", "temporaries")
        r.compute("vecquant", flops, stored + 4 * (x.count + out.count + scales.count), FP32.math)
        del wide, scales
        out = r.tensor(shape, x.format, "to")
    else:
        whole = shifted(r, weight, (width, layer.outputs), ctx)
        out = r.tensor(shape, x.format, "linear")
        r.compute(
            "linear",
            flops,
            (x.count + out.count + whole.count) * x.format.block_bytes,
            x.format.math,
        )
        del whole
    return out if layer.bias is None else ops.add(r, out, layer.bias)


def shifted(r: Recorder, weight: Tensor, shape: tuple[int, int], ctx: Context) -> Tensor:
    """The weight in fp16, made by torch's operations. With sorted rows each value gets the scale
    and the zero point of its row first (AutoGPTQ 0.7 nn_modules/qlinear/qlinear_cuda.py)."""
    narrow = INT16 if weight.format.name.startswith("gptq-8bit") else INT8
    settings = settings_in(ctx.program.model.config)
    wide = r.tensor(shape, INT32, "shift", "temporaries")
    taken = r.tensor(shape, narrow, "to", "temporaries")
    del wide
    masked = r.tensor(shape, narrow, "bitwise_and", "temporaries")
    del taken
    sorted_rows = settings.get("desc_act") and settings.get("group_size") != -1
    scales = r.tensor(shape, FP16, "index", "temporaries") if sorted_rows else None
    zeros = r.tensor(shape, narrow, "index", "temporaries") if sorted_rows else None
    less = r.tensor(shape, narrow, "sub", "temporaries")
    del zeros
    whole = r.tensor(shape, FP16, "mul", "temporaries")
    del masked, less, scales
    return whole


def back_stored(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The weight once more in the gradient's dtype."""
    shape, outputs = node.extra
    g = ops.rows(r, g)
    weight = r.tensor((outputs, shape[-1]), g.format, "dequantize", "temporaries")
    to_x = r.tensor(shape, g.format, "linear")
    r.compute(
        "linear",
        2 * g.count * shape[-1],
        (g.count + to_x.count + weight.count) * g.format.block_bytes,
        g.format.math,
    )
    del weight
    return (to_x,)
