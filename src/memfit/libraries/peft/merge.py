"""The end of a run with adapters: merged into the weights, layer by layer, on the GPU (peft 0.21
tuners/lora/layer.py, bnb.py; called by merge_and_unload). What the optimizer holds, the adapters
among it, is still there.

Saving itself takes nothing on the GPU: safetensors and torch.save copy one tensor after the other
to the host, and contiguous tensors are written as they are (transformers 5.23 modeling_utils.py
save_pretrained, safetensors.torch).
"""

from __future__ import annotations

from memfit.formats import FP16, FP32, INT8
from memfit.libraries.bitsandbytes.packing import four_bits, unpacked
from memfit.lower.bound import Adapted, Bound, BoundLinear
from memfit.lower.packing import Packed
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.program import Program


def merge(r: Recorder, program: Program, bounds: list[Bound], step: int) -> None:
    """Every adapted layer; copies that were trained whole simply take the originals' place."""
    for bound in bounds:
        r.mark("save", bound.prefix, step)
        for name, linear in bound.linears.items():
            if linear.adapter is None:
                continue
            r.where = linear.path
            if linear.packed is None:
                difference = delta(r, linear.adapter)  # added to the weight in place
                del difference
                continue
            again = merge_four_bits if linear.packed.bits == 4 else merge_eight_bits
            linear.packed = bound.packed[name] = again(
                r, program, linear, linear.packed, linear.adapter
            )
            linear.weight = linear.packed.weight
        for name, adapter in bound.stacks.items():
            r.where = bound.path(name.rpartition(".")[0])
            merge_stack(r, bound[name], adapter)
        bound.idle = [
            tensor for tensor in bound.idle if tensor.name.endswith((".lora_A", ".lora_B"))
        ]
    r.mark("save", "", step)


def delta(r: Recorder, adapter: Adapted) -> Tensor:
    """s·B·A: the product and its scaled copy stand together for a moment, in the adapter's
    dtype."""
    shape = (adapter.b.shape[0], adapter.a.shape[1])
    product = r.tensor(shape, adapter.a.format, "matmul", "temporaries")
    r.compute(
        "matmul",
        2 * product.count * adapter.rank,
        product.count * product.format.block_bytes,
        product.format.math,
    )
    scaled = r.like(product, "scale", "temporaries")
    del product
    return scaled


def merge_four_bits(
    r: Recorder, program: Program, linear: BoundLinear, packed: Packed, adapter: Adapted
) -> Packed:
    """Unpacked, added to in fp32, through the host, and packed anew from fp32, which it then
    unpacks to; all of it is held by variables until the layer is done."""
    weight = unpacked(r, packed, packed.source)
    difference = delta(r, adapter)
    total = r.tensor(difference.shape, FP32, "add", "temporaries")
    arrived = r.tensor(difference.shape, FP32, "to", "temporaries")
    again = four_bits(r, linear.inputs * linear.outputs, packed.shape, FP32, program)
    del weight, difference, total, arrived
    return again


def merge_eight_bits(
    r: Recorder, program: Program, linear: BoundLinear, packed: Packed, adapter: Adapted
) -> Packed:
    """As four bits; unpacking is a product with the scales and then with a number, in fp32, and
    packing starts from fp16."""
    first = r.tensor(packed.shape, FP32, "mul", "temporaries")
    weight = r.like(first, "mul", "temporaries")
    del first
    difference = delta(r, adapter)
    total = r.tensor(difference.shape, FP32, "add", "temporaries")
    half = r.tensor(packed.shape, FP16, "to", "temporaries")
    scales = r.tensor((linear.outputs,), FP32, "quantize", "weights")
    again = Packed(
        weight=r.tensor(packed.shape, INT8, "quantize", "weights"),
        source=packed.source,
        shape=packed.shape,
        scales=scales,
    )
    del weight, difference, total, half
    return again


def merge_stack(r: Recorder, weight: Tensor, adapter: Adapted) -> None:
    """All experts at once, in the adapter's dtype and then in the stack's
    (ParamWrapper.get_delta_weight)."""
    by_expert = r.like(adapter.b, "clone", "temporaries")
    product = r.tensor(weight.shape, adapter.a.format, "einsum", "temporaries")
    r.compute(
        "matmul",
        2 * product.count * adapter.rank,
        product.count * product.format.block_bytes,
        product.format.math,
    )
    del by_expert
    scaled = r.like(product, "scale", "temporaries")
    del product
    cast = (
        r.tensor(weight.shape, weight.format, "to", "temporaries")
        if weight.format is not scaled.format
        else scaled
    )
    del scaled, cast


def overlay(programs: Programs, program: Program) -> Programs:
    return programs.replace(merge=merge)
