"""Selective checkpointing as torch runs it: a `context_fn` for `activation_checkpointing_kwargs`,
which transformers hands to torch.utils.checkpoint. The policy is the one that is published,
torchtitan's (distributed/activation_checkpoint.py, SelectiveAC): what attention and products put
out is kept, of matrix products every second one, and the rest runs again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from memfit.trace.ops import op

MATRIX = op("mm")
KEPT = {
    found
    for name in (
        "mm",
        "addmm",
        "bmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if (found := op(name)) is not None
}  # torch 2.13 torch/_functorch/partitioners.py get_default_op_list, compute_intensive_ops


def contexts() -> Any:
    """The two contexts of one checkpoint; products are counted anew in each."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    products: Counter[bool] = Counter()

    def policy(context: Any, func: Any, *_: Any, **__: Any) -> Any:
        again = bool(context.is_recompute)
        products[again] += func is MATRIX
        kept = func in KEPT and not (func is MATRIX and products[again] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


__all__ = ["contexts"]
