"""Kernels that a class loads from the hub, by what they allocate; without them MRA computes zeros,
so nobody trains it without the package `kernels`."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from memfit.trace import cuda

BLOCK = 32


class Mra:
    """What transformers' class calls (transformers 4.56 src/transformers/kernels/mra/
    cuda_launch.cu, which kernels-community/mra has now)."""

    @staticmethod
    def index_max(values: Any, indices: Any, rows: int, columns: int) -> tuple[Any, Any]:
        batch, count = indices.shape
        return values.new_zeros(batch, rows * BLOCK), values.new_zeros(batch, BLOCK, count)

    @staticmethod
    def mm_to_sparse(query: Any, key: Any, indices: Any) -> Any:
        return query.new_zeros(*indices.shape, BLOCK, BLOCK)

    @staticmethod
    def sparse_dense_mm(sparse: Any, indices: Any, key: Any, rows: int) -> Any:
        return key.new_zeros(len(key), rows, key.shape[2], BLOCK)


KERNELS = {("transformers.models.mra.modeling_mra", "mra_cuda_kernel"): Mra}


def installed() -> contextlib.AbstractContextManager[None]:
    """Inside, classes that are loaded have their kernels."""
    found = [(sys.modules.get(module), name, one) for (module, name), one in KERNELS.items()]
    return cuda.patched([one for one in found if one[0] is not None])


__all__ = ["installed"]
