"""A module's weights on the device, found by the names its data gives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memfit.formats import FORMATS, FP8, FP32, INT32, UINT8, Format
from memfit.lazy_dataclass import dataclass
from memfit.lower.packing import Packed, Packing
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.model.model import located
from memfit.model.modules import Linear, Weight
from memfit.optimizers import OPTIMIZERS
from memfit.program import Program

FOLLOWS = (0, 19)  # peft whose adapters take the compute dtype of 4-bit layers
WHOLE = frozenset(
    {"granitemoe", "gpt_oss"}
    # families whose checkpoints hold the stacks as they are (transformers 5.23
    # conversion_mapping.py)
)


@dataclass(slots=True, kw_only=True)
class Adapted:
    """The two matrices of a LoRA adapter; `device` tensors, trained."""

    a: Tensor
    b: Tensor
    rank: int
    dropout: float
    scaled: bool = True  # the scaling is not 1


@dataclass(slots=True, kw_only=True)
class BoundLinear:
    """A linear layer ready to run."""

    path: str
    inputs: int
    outputs: int
    weight: Tensor
    bias: Tensor | None
    adapter: Adapted | None = None
    packed: Packed | None = None
    conv1d: bool = False
    across: str = ""  # as the layer's own
    joined: bool = False


CHUNK = (
    2**25
)  # rows of 32 values that are unpacked at once (transformers 5.23 integrations/mxfp4.py)


def unpacked(r: Recorder, count: int, format: Format) -> tuple[Tensor, ...]:
    """What stands beside a stack of experts that is made of MXFP4 blocks on the GPU: the blocks,
    their scales, and the result before it is turned; before that, indices into a table
    (integrations/mxfp4.py _convert_moe_packed_tensors)."""
    rows = count // 32
    blocks = r.tensor((rows, 16), UINT8, "load", "temporaries")
    scales = r.tensor((rows,), INT32, "sub", "temporaries")
    out = r.tensor((rows, 32), format, "empty", "temporaries")
    for first in range(0, rows, CHUNK):
        part = min(CHUNK, rows - first)
        half = r.tensor((part, 16), UINT8, "and", "temporaries")
        index = r.tensor((part, 16), INT32, "to", "temporaries")
        del half
        values = r.tensor((part, 16), format, "index", "temporaries")
        del index, values
    return blocks, scales, out


def widened(r: Recorder, weight: Weight, format: Format) -> None:
    """What a matrix stored in fp8 passes through on the GPU, one expert at a time: itself, in fp32,
    times its scales, and in the end (integrations/finegrained_fp8.py
    Fp8Dequantize._dequantize_one)."""
    shape = weight.shape[-2:]
    stored = r.tensor(shape, FP8, "load", "temporaries")
    wide = r.tensor(shape, FP32, "to", "temporaries")
    scaled = r.tensor(shape, FP32, "mul", "temporaries")
    out = r.tensor(shape, format, "to", "temporaries")
    del stored, wide, scaled, out


class Bound:
    """The weights of one layer, or of the model's ends; `prefix` leads to them."""

    def __init__(
        self, r: Recorder, program: Program, prefix: str, packing: Packing | None = None
    ) -> None:
        self.r, self.program, self.prefix, self.packing = r, program, prefix, packing
        self.tensors: dict[str, Tensor] = {}
        self.buffers: set[str] = set()
        self.packed: dict[str, Packed] = {}
        self.linears: dict[str, BoundLinear] = {}
        self.stacks: dict[str, Adapted] = {}  # adapters of parameters outside linear layers
        self.idle: list[Tensor] = []  # held, and never used
        self.ends: Bound | None = None  # of a layer, whose code may read weights outside of it

    def path(self, name: str) -> str:
        return located(self.prefix, name) if self.prefix else name

    def load(self, weights: Iterable[Weight], linears: Iterable[Linear]) -> None:
        """Bring every weight to the device, in the model's order."""
        packs = self.program.quantized
        quantized = (
            {
                f"{linear.name}.weight": linear
                for linear in linears
                if packs(linear, self.path(linear.name))
            }
            if self.program.quant
            else {}
        )
        for weight in weights:
            self.r.where = self.path(weight.name.rpartition(".")[0])
            if weight.name in quantized:
                linear = quantized[weight.name]
                assert self.packing is not None
                self.packed[linear.name] = packed = self.packing.pack(
                    self.r, self.program, linear, self.format(weight)
                )
                packed.weight.name = weight.name
            else:
                self.tensors[weight.name] = self.parameter(weight)

    def stop(self, names: Iterable[str]) -> list[Tensor]:
        """Those of these weights that would train, and now get no gradient."""
        found = [self.tensors[name] for name in names if name in self.tensors]
        found = [tensor for tensor in found if tensor.needs]
        for tensor in found:
            tensor.needs = False
        return found

    def parameter(self, weight: Weight) -> Tensor:
        if weight.role == "buffer":
            self.buffers.add(weight.name)
            return self.r.leaf(weight.shape, self.format(weight), weight.name, "buffers", False)
        needs = self.program.trains(weight, self.path(weight.name))
        sources = self.sources(weight) if weight.role in ("linear", "expert") else None
        stack = self.r.leaf(weight.shape, self.format(weight), weight.name, "weights", needs)
        del sources
        return stack

    def sources(self, weight: Weight) -> Tensor | tuple[Tensor, ...] | None:
        """What a stack of experts is made of as it is loaded straight to the GPU: checkpoints keep
        each expert by itself, or, where two matrices lie in one stack, the two stacks that come of
        those (transformers 5.23 core_model_loading.py MergeModulelist, Concatenate). Of one size
        with the stack; each kind stands as one block here."""
        program = self.program
        if program.opened == "fp8" and program.job.mapped and self.prefix:
            widened(self.r, weight, self.format(weight))
        if len(weight.shape) != 3 or weight.role != "expert":
            return None
        if program.opened == "mxfp4" and program.job.mapped:
            return unpacked(self.r, weight.count, self.format(weight))
        if (
            not program.job.mapped
            or program.job.version("transformers") < (5, 0)
            or program.model.family in WHOLE
        ):
            return None
        each = self.r.tensor(weight.shape, self.format(weight), "load", "temporaries")
        if not weight.name.endswith("gate_up_proj"):
            return each
        halves = self.r.tensor(weight.shape, self.format(weight), "stack", "temporaries")
        del each
        return halves

    def format(self, weight: Weight) -> Format:
        return FORMATS[weight.format or self.program.weights]

    @property
    def fixed(self) -> bool:
        """The optimizer trains the B of adapters only."""
        return OPTIMIZERS[self.program.job.optimizer].freezes == ".lora_A"

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Weights that are neither packed nor buffers, by name."""
        return ((name, tensor) for name, tensor in self.tensors.items() if name not in self.buffers)

    def adapt(self, linears: Iterable[Linear], idle: bool = False) -> None:
        """Add the LoRA matrices: A is (rank, in), B is (out, rank) (peft 0.21
        tuners/lora/layer.py). `idle`: what they stand beside is never run."""
        adapter = self.program.adapter
        if adapter is None:
            return
        for linear in linears:
            if not self.program.adapted(linear):
                continue
            self.r.where = self.path(linear.name)
            format = self.adapter_format(linear.name)
            a = self.r.leaf(
                (adapter.rank, linear.inputs),
                format,
                f"{linear.name}.lora_A",
                "weights",
                not idle and not self.fixed,
            )
            b = self.r.leaf(
                (linear.outputs, adapter.rank), format, f"{linear.name}.lora_B", "weights", not idle
            )
            if idle:
                self.idle += [a, b]
            else:
                self.linear(linear).adapter = Adapted(
                    a=a, b=b, rank=adapter.rank, dropout=adapter.dropout
                )

    def adapter_format(self, name: str) -> Format:
        """fp32 as PEFT casts them, or else what they are beside: the weight's dtype; of 4-bit
        layers the compute dtype; bytes are no dtype to follow, so torch's default stays (peft 0.21
        tuners/tuners_utils.py _get_base_layer_device_and_dtype). FSDP shards 4-bit weights that
        are stored as the model's own dtype, which older versions follow (peft 0.9
        tuners/lora/layer.py update_layer)."""
        program, packed = self.program, self.packed.get(name)
        assert program.adapter is not None
        if packed is None or program.adapter.narrow or program.adapter.format != program.weights:
            return FORMATS[program.adapter.format]
        if packed.bits != 4 or program.quant is None:
            return FP32
        if program.job.version("peft") >= FOLLOWS:
            return FORMATS[program.quant.compute]
        fsdp = program.strategy.fsdp
        return FORMATS[program.weights] if fsdp is not None and fsdp.packed else FP32

    def adapt_parameters(self) -> None:
        """The adapters of a stack of E matrices (out, in) are (E·rank, in) and (out, E·rank), in
        fp32 or the stack's own dtype."""
        adapter = self.program.adapter
        if adapter is None or not adapter.parameters:
            return
        for name, tensor in tuple(self.parameters()):
            rank = next(
                (rank for end, rank in adapter.parameters if self.path(name).endswith(f".{end}")), 0
            )
            if rank == 0:
                continue
            experts = tensor.shape[0] if len(tensor.shape) == 3 else 1
            self.r.where = self.path(name.rpartition(".")[0])
            follows = adapter.format == self.program.weights and not adapter.narrow
            format = tensor.format if follows else FORMATS[adapter.format]
            a = self.r.leaf(
                (experts * rank, tensor.shape[-1]),
                format,
                f"{name}.lora_A",
                "weights",
                not self.fixed,
            )
            b = self.r.leaf(
                (tensor.shape[-2], experts * rank), format, f"{name}.lora_B", "weights", True
            )
            self.stacks[name] = Adapted(
                a=a, b=b, rank=rank, dropout=0.0, scaled=adapter.scaling != 1.0
            )

    def copy_saved(self) -> None:
        """Modules that are trained whole: a copy is trained, the original stays (peft 0.21
        utils/other.py ModulesToSaveWrapper)."""
        adapter = self.program.adapter
        if adapter is None or not adapter.saved:
            return
        for name, tensor in tuple(self.parameters()):
            if adapter.saves(self.path(name.rpartition(".")[0])):
                self.r.where = self.path(name.rpartition(".")[0])
                self.idle.append(tensor)
                self.r.shared.discard(tensor.name)  # a copy is tied to nothing
                format = FORMATS[adapter.format] if adapter.narrow else tensor.format
                self.tensors[name] = self.r.leaf(tensor.shape, format, tensor.name, "weights", True)

    def linear(self, linear: Linear) -> BoundLinear:
        bound = self.linears.get(linear.name)
        if bound is None:
            packed = self.packed.get(linear.name)
            weight = self.tensors[f"{linear.name}.weight"] if packed is None else packed.weight
            bias = self.tensors.get(f"{linear.name}.bias")
            bound = self.linears[linear.name] = BoundLinear(
                path=self.path(linear.name),
                inputs=linear.inputs,
                outputs=linear.outputs,
                weight=weight,
                bias=bias,
                packed=packed,
                conv1d=linear.conv1d,
                across=linear.across,
                joined=linear.joined,
            )
        return bound

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def trained(self) -> list[Tensor]:
        """Everything with a gradient, in the order of the model's parameters."""
        leaves = [
            tensor
            for tensor in {id(tensor): tensor for tensor in self.tensors.values()}.values()
            if tensor.needs
        ]  # a tied head stands twice
        adapters = [*(linear.adapter for linear in self.linears.values()), *self.stacks.values()]
        return leaves + [
            matrix
            for adapter in adapters
            if adapter is not None
            for matrix in (adapter.a, adapter.b)
            if matrix.needs
        ]
