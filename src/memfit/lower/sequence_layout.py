"""The seam through which ranks share the tokens of a sequence (context parallelism): what
attention, masks and batches ask, and the answers of a rank that has all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Shape, Tensor

if TYPE_CHECKING:
    from memfit.lower.attention.sdpa import Call
    from memfit.lower.context import Context
    from memfit.program import Program

Run = Callable[[Tensor, Tensor, Tensor, Any, "Context"], Tensor]


class SequenceLayout:
    """Every rank has all tokens: nothing is sent."""

    masked = True  # the model makes attention masks
    counted = False  # batches of a training step bring the positions of their tokens
    evaluates = True  # evaluations run this way, too

    def attend(
        self, run: Run, q: Tensor, k: Tensor, v: Tensor, module: Any, ctx: Context
    ) -> Tensor:
        """Attention over all tokens; `run` is the kernel on what one rank has."""
        return run(q, k, v, module, ctx)

    def has_last_token(self) -> bool:
        """Whether this rank has the last token of each sequence, which has no label."""
        return False

    def sdpa(self, call: Call, backend: str, ctx: Context) -> Tensor | None:
        """SDPA in this layout's own way; None where torch's kernel runs as it is."""
        return None

    def unseen_mask(self, ctx: Context) -> Tensor | None:
        """A mask that layers are given and attention is not."""
        return None

    def batch(self, r: Recorder, program: Program, shape: Shape) -> tuple[Tensor, ...] | None:
        """A micro-batch's tensors; None where they are the usual ones."""
        return None


ALL_TOKENS = SequenceLayout()
