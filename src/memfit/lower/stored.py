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
beyond.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from memfit.formats import FP8, FP16, FP32, INT16, INT32, Format
from memfit.job import Job
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
BLOCK = 128  # values of an input that share an fp8 scale


def exllama(job: Job, weight: Tensor) -> bool:
    """Whether ExLlama's first kernels multiply by the weight: AutoGPTQ's own for 4 bits
    (transformers 4.46 utils/quantization_config.py GPTQConfig.post_init), which train nothing."""
    four_bits = weight.format.name.startswith("gptq-4bit")
    return four_bits and not job.training and job.version("transformers") < GPTQMODEL


def exllama_buffers(r: Recorder, program: Program, weights: Iterable[Tensor]) -> list[Tensor]:
    """What ExLlama unpacks weights into: a block as large as the largest in fp16, made once and
    kept; where rows are sorted by the weights' groups (`desc_act`), one for the inputs, too
    (AutoGPTQ 0.7 modeling/_utils.py autogptq_post_init)."""
    shapes = [one.shape for one in weights if exllama(program.job, one)]
    if not shapes:
        return []
    r.where = "exllama"
    buffers = [r.tensor((1, max(prod(shape) for shape in shapes)), FP16, "temp_dq", "workspace")]
    if settings_in(program.model.config).get("desc_act"):
        widest = max(max(shape) for shape in shapes)
        buffers.append(r.tensor((SORTED_ROWS, widest), FP16, "temp_state", "workspace"))
    return buffers


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
    if (
        weight.format.name.startswith("gptq-8bit")
        and ctx.job.version("transformers") < GPTQMODEL
        and not r.grad
    ):
        return older_eight_bits(x, layer, ctx)
    if method in FEW:
        held = ()
        if rows > FEW[method] or (r.grad and x.needs):
            if exllama(ctx.job, weight):
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


def older_eight_bits(x: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
    """The fp32 output is made first, input and scales are cast beside it; for many rows bits are
    shifted into int32, taken as int16, and scaled (AutoGPTQ 0.7
    nn_modules/qlinear/qlinear_cuda_old.py QuantLinear.forward)."""
    r, weight = ctx.r, layer.weight
    rows, width = x.count // x.shape[-1], x.shape[-1]
    shape, flops = (*x.shape[:-1], layer.outputs), 2 * rows * width * layer.outputs
    stored = weight.format.bytes(weight.count)
    if rows <= OLDER_ROWS:
        out = r.tensor(shape, FP32, "zeros", "temporaries")
        wide = r.tensor(x.shape, FP32, "to", "temporaries")
        scales = r.tensor(
            (-(-width // weight.format.block), layer.outputs), FP32, "to", "temporaries"
        )
        r.compute("vecquant8", flops, stored + 4 * (x.count + out.count + scales.count), FP32.math)
        del wide, scales
        out = r.tensor(shape, x.format, "to")
    else:
        shifted = r.tensor((width, layer.outputs), INT32, "shift", "temporaries")
        taken = r.tensor(shifted.shape, INT16, "to", "temporaries")
        del shifted
        less = r.tensor(taken.shape, INT16, "sub", "temporaries")
        whole = r.tensor(taken.shape, x.format, "mul", "temporaries")
        del taken, less
        out = r.tensor(shape, x.format, "linear")
        r.compute(
            "linear",
            flops,
            (x.count + out.count + whole.count) * x.format.block_bytes,
            x.format.math,
        )
        del whole
    return out if layer.bias is None else ops.add(r, out, layer.bias)


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
