"""How weights come to the GPU: the warm-up of the allocator, packing as they arrive, and PEFT's
preparation of packed models.

Without packing, a weight that arrives is there once and nothing else: `from_pretrained` without a
device_map fills the model on the host, and with one copies tensor by tensor; a change of dtype
happens on the host in both (transformers 5.23 core_model_loading.py opens files on the CPU;
aten/src/ATen/native/cuda/Copy.cu converts a blocking copy there).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memfit.formats import BF16, FORMATS, FP16, FP32, Format
from memfit.lower.bound import Bound
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.model.modules import Linear, Weight
from memfit.model.quantized import method
from memfit.program import Program

WARMED = (4, 50)  # the first transformers that does so
KEPT_FREE = int(
    1.2 * 2**30
)  # left over by the warm-up (modeling_utils.py caching_allocator_warmup)


def warm_up(r: Recorder, program: Program) -> None:
    """One block as large as the whole model, given back at once: what it was cut from then takes
    the weights (transformers 5.23 modeling_utils.py caching_allocator_warmup; 4.51 halved the bytes
    of every packed model instead, one that is stored so too, and counted a tied head like the
    embedding). Buffers that are no part of the
    checkpoint do not count; the few that are, are left out here."""
    job, model = program.job, program.model
    version = job.version("transformers")
    if not job.mapped or version < WARMED:
        return
    packed = {f"{name}.weight" for name in packed_names(program)}
    half = version < (4, 57) and (program.quant is not None or bool(method(model.config)))
    tied_too = (
        (Weight(name="", shape=(model.vocab, model.width)),)
        if model.tied and version < (4, 57)
        else ()
    )
    size = 0.0
    for weight in (*model.weights(), *tied_too):
        bytes = float(FORMATS[weight.format or program.weights].bytes(weight.count))
        if half:
            bytes /= 2
        elif weight.name in packed:
            bytes = weight.count * (1.0 if job.quantization == "int8" else 0.5)
        size += bytes
    warm(r, program, size)


def warm(r: Recorder, program: Program, size: float) -> None:
    """The block for `size` bytes of weights."""
    if not program.job.mapped or program.job.version("transformers") < WARMED:
        return
    limit = program.gpu.memory - KEPT_FREE if program.gpu is not None else size
    block = r.scratch(2 * int(min(size, max(limit, 0)) // 2), "warmup", "weights")
    del block


def head_apart(r: Recorder, program: Program) -> Tensor | None:
    """A tied head that its checkpoint stores beside the embedding, as AutoAWQ writes every tensor
    of the state dict by itself (0.1.8 to 0.2.6 awq/models/base.py save_quantized). Loaded straight
    to the GPU it is there until the model ties its weights, after the last of them
    (transformers 4.46 modeling_utils.py from_pretrained)."""
    model = program.model
    if not (model.tied and program.job.mapped and method(model.config) == "awq"):
        return None
    return r.tensor((model.vocab, model.width), FORMATS[program.weights], "load", "weights")


def packed_names(program: Program) -> Iterator[str]:
    """Paths of the linear layers that bitsandbytes stores."""
    if program.quant is None:
        return
    model = program.model
    for index, layer in enumerate(model.layers):
        for linear in layer.linears():
            path = f"{model.path(index)}.{linear.name}"
            if program.quantized(linear, path):
                yield path
    for module in (*model.embed, *model.final, model.head):
        yield from (
            linear.name for linear in module.linears() if program.quantized(linear, linear.name)
        )
    for linear in idle_linears(model.towers):
        if program.quantized(linear, linear.name):
            yield linear.name


def idle_linears(weights: Iterable[Weight]) -> list[Linear]:
    """The linear layers among the weights of an idle tower."""
    return [
        Linear(
            name=weight.name.removesuffix(".weight"),
            inputs=weight.shape[1],
            outputs=weight.shape[0],
        )
        for weight in weights
        if weight.role == "linear" and len(weight.shape) == 2 and weight.name.endswith(".weight")
    ]


def repack(bound: Bound) -> None:
    """Reading the checkpoint packs each weight anew; the old one goes when the new one is there
    (lightning 2.6 fabric/plugins/precision/bitsandbytes.py _quantize_on_load_hook)."""
    for name, old in list(bound.packed.items()):
        assert bound.packing is not None
        bound.r.where = bound.path(name)
        bound.packed[name] = bound.packing.pack(
            bound.r,
            bound.program,
            Linear(name=name, inputs=old.shape[1], outputs=old.shape[0]),
            old.source,
        )


def prepare(bound: Bound) -> None:
    """PEFT's prepare_model_for_kbit_training: every 16-bit parameter that is not packed becomes
    fp32, the stacked experts too, one after the other (peft 0.21 utils/other.py). The bias of a
    4-bit layer goes back to its compute dtype in the first forward (bitsandbytes 0.50 nn/modules.py
    Linear4bit.forward), and is left as it is here."""
    for name in [name for name, _ in bound.parameters()]:
        packed = bound.packed.get(name.removesuffix(".bias"))
        if bound[name].format in (BF16, FP16) and not (packed is not None and packed.bits == 4):
            recast(bound, name, FP32)


def narrow(bound: Bound) -> None:
    """TRL's way back, after the adapters are there: embeddings and head by their usual names (trl
    0.13 trainer/utils.py peft_module_casting_to_bf16)."""
    quant = bound.program.quant
    for name in [name for name, _ in bound.parameters()]:
        module = bound.path(name.rpartition(".")[0])
        if (
            quant is not None
            and bound[name].format is FP32
            and any(part in module for part in quant.narrowed)
        ):
            recast(bound, name, BF16)
    for index, tensor in enumerate(bound.idle):
        module = bound.path(tensor.name.rpartition(".")[0])
        if (
            quant is not None
            and tensor.format is FP32
            and any(part in module for part in quant.narrowed)
        ):
            bound.r.where = module
            bound.idle[index] = bound.r.leaf(tensor.shape, BF16, tensor.name, "weights", False)


def recast(bound: Bound, name: str, format: Format) -> None:
    """The parameter in another dtype; the old one goes when the new one is there. Tied ones change
    together."""
    tensors, old = bound.tensors, bound[name]
    bound.r.where = bound.path(name.rpartition(".")[0])
    new = bound.r.leaf(old.shape, format, old.name, "weights", old.needs)
    for tied in [other for other, tensor in tensors.items() if tensor is old]:
        tensors[tied] = new
    bound.idle = [new if tensor is old else tensor for tensor in bound.idle]
