"""The interface of tensor parallelism: what the modules ask, and the answers for a rank that has
every matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memfit.lower import ops
from memfit.lower.tensors import Tensor

if TYPE_CHECKING:
    from memfit.lower.bound import BoundLinear
    from memfit.lower.context import Context
    from memfit.model.modules import Embedding, Latent


class MatrixLayout:
    """Every rank has every matrix whole: nothing is sent."""

    def ranks(self, ctx: Context) -> int:
        """The number of ranks that share each matrix."""
        return 1

    def linear(
        self, run: Callable[[Tensor, bool], Tensor], x: Tensor, ctx: Context, apart: bool
    ) -> Tensor:
        """The whole linear layer; `run(x, apart)` is one rank's part of it."""
        return run(x, apart)

    def enter_linear(self, x: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
        """The input as this rank's part of the matrix takes it."""
        return x

    def leave_linear(self, out: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
        """The output as the next module takes it."""
        return out

    def block_input(self, x: Tensor, ctx: Context) -> Tensor:
        """What attention or a feed-forward gets of the hidden states."""
        return x

    def positions(self, ctx: Context) -> Tensor | None:
        """Position ids, where the caller must hand them over."""
        return None

    def embedding(self, ids: Tensor, weight: Tensor, module: Embedding, ctx: Context) -> Tensor:
        """Rows of the table of tokens."""
        return ops.embedding(ctx.r, ids, weight)

    def embedding_output(self, x: Tensor, ctx: Context) -> Tensor:
        """All columns of an embedding's output."""
        return x

    def shared_key(self, compressed: Tensor, module: Latent, ctx: Context) -> Tensor:
        """The compressed keys and values, whose rotated part all heads share."""
        return compressed

    def full_weight(self, ctx: Context, weight: Tensor) -> Tensor:
        """All rows of a weight."""
        return weight

    def cross_entropy(self, ctx: Context, logits: Tensor, labels: Tensor) -> Tensor:
        return ops.cross_entropy(ctx.r, logits, labels)


WHOLE = MatrixLayout()
