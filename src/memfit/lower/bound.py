"""A module's weights on the device, found by the names its data gives them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memfit.formats import FORMATS, Format
from memfit.lower.recorder import Recorder, Tensor
from memfit.model.modules import Linear, Weight
from memfit.program import Program
from memfit.tape import Part


@dataclass(slots=True, kw_only=True)
class Adapted:
    """The two matrices of a LoRA adapter; `device` tensors, trained."""

    a: Tensor
    b: Tensor
    rank: int
    dropout: float


@dataclass(slots=True, kw_only=True)
class BoundLinear:
    """A linear layer ready to run. `stored` keeps the quantization constants alive beside the weight."""

    path: str
    inputs: int
    outputs: int
    weight: Tensor
    bias: Tensor | None
    adapter: Adapted | None = None
    quant: str = ""
    absmax: int = 0  # bytes of the fp32 constants that nested quantization unpacks
    stored: tuple[Tensor, ...] = ()


class Bound:
    """The weights of one layer, or of the model's ends; `prefix` leads to them."""

    def __init__(self, r: Recorder, program: Program, prefix: str) -> None:
        self.r, self.program, self.prefix = r, program, prefix
        self.tensors: dict[str, Tensor] = {}
        self.linears: dict[str, BoundLinear] = {}

    def path(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name

    def load(self, weights: Iterable[Weight], linears: Iterable[Linear]) -> None:
        """Bring every weight to the device, in the model's order."""
        quantized = {linear.name: linear for linear in linears if self.program.quantized(linear)}
        for weight in weights:
            owner = quantized.get(weight.name.removesuffix(".weight")) if weight.role == "linear" else None
            self.r.where = self.path(weight.name.rpartition(".")[0])
            if owner is not None:
                self.linears[owner.name] = quantize(self, owner)
            else:
                self.tensors[weight.name] = self.parameter(weight)

    def parameter(self, weight: Weight) -> Tensor:
        needs = self.program.trains(weight)
        part: Part = "buffers" if weight.role == "buffer" else "weights"
        return self.r.leaf(weight.shape, self.format(weight), weight.name, part, needs)

    def format(self, weight: Weight) -> Format:
        return FORMATS[weight.format or self.program.weights]

    def adapt(self, linears: Iterable[Linear]) -> None:
        """Add the LoRA matrices (peft.tuners.lora.layer: A is (rank, in), B is (out, rank))."""
        adapter = self.program.adapter
        if adapter is None:
            return
        for linear in linears:
            if not self.program.adapted(linear):
                continue
            bound = self.linear(linear)
            self.r.where = bound.path
            format = FORMATS[adapter.format]
            a = self.r.leaf((adapter.rank, linear.inputs), format, f"{linear.name}.lora_A", "weights", True)
            b = self.r.leaf((linear.outputs, adapter.rank), format, f"{linear.name}.lora_B", "weights", True)
            bound.adapter = Adapted(a=a, b=b, rank=adapter.rank, dropout=adapter.dropout)

    def linear(self, linear: Linear) -> BoundLinear:
        bound = self.linears.get(linear.name)
        if bound is None:
            weight, bias = self.tensors[f"{linear.name}.weight"], self.tensors.get(f"{linear.name}.bias")
            bound = BoundLinear(path=self.path(linear.name), inputs=linear.inputs, outputs=linear.outputs, weight=weight, bias=bias)
            self.linears[linear.name] = bound
        return bound

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def trained(self) -> list[Tensor]:
        """Everything with a gradient, in the order of the model's parameters."""
        leaves = [tensor for tensor in {id(tensor): tensor for tensor in self.tensors.values()}.values() if tensor.needs]  # a tied head stands twice
        for linear in self.linears.values():
            if linear.adapter is not None:
                leaves += [linear.adapter.a, linear.adapter.b]
        return leaves


def quantize(bound: Bound, linear: Linear) -> BoundLinear:
    """A weight in bitsandbytes' 4 or 8 bits with its constants (bitsandbytes 0.50 functional.py quantize_4bit, nn/modules.py)."""
    raise NotImplementedError
