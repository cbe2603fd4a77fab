"""The seam through which a library packs weights: what loading and linear layers ask of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memfit.formats import Format
from memfit.lazy_dataclass import dataclass
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor

if TYPE_CHECKING:
    from memfit.lower.bound import BoundLinear
    from memfit.lower.context import Context
    from memfit.model.modules import Linear
    from memfit.program import Program


@dataclass(slots=True, kw_only=True)
class Packed:
    """A packed weight and what undoes that. `source` is the format it was packed from, and comes
    back in."""

    weight: Tensor
    source: Format
    shape: tuple[int, int]
    scales: Tensor  # int8: fp32, one a row; 4 bits: one a block, fp32 or, with `nested`, in 8 bits
    nested: tuple[
        Tensor, ...
    ] = ()  # the mean of the scales, their own scales, and the code of those
    code: Tensor | None = None
    tiled: bool = False  # int8 before 0.45, after its first use

    @property
    def bits(self) -> int:
        return 4 if self.code is not None else 8


class Packing(Protocol):
    """A library that stores the weights of linear layers in fewer bits."""

    def pack(self, r: Recorder, program: Program, linear: Linear, format: Format) -> Packed:
        """The packed weight of a layer that is being loaded."""
        ...

    def forward(self, x: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
        """The layer's output for x."""
        ...
