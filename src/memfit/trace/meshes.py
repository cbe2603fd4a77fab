"""Parameters on several meshes, some of them on none: what the Trainer of transformers does apart
for each (transformers 5.23 trainer.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """One kernel call cannot take tensors of several meshes."""
    found: dict[Any, list[torch.Tensor]] = {}
    for one in tensors:
        found.setdefault(getattr(one, "device_mesh", None), []).append(one)
    return list(found.values())


def clip(parameters: list[torch.Tensor], limit: float) -> None:
    """The norm of all gradients, mesh by mesh (`_mixed_mesh_grad_norm`)."""
    groups = by_mesh(one for one in parameters if one.grad is not None)
    if len(groups) < 2:
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        return
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    norms = [
        get_total_norm([one.grad for one in group if one.grad is not None]) for group in groups
    ]
    whole = torch.linalg.vector_norm(
        torch.stack([one.full_tensor() if hasattr(one, "full_tensor") else one for one in norms])
    )
    for group in groups:
        clip_grads_with_norm_(group, limit, whole)


__all__ = ["by_mesh", "clip"]
