"""What autograd does with one operation, found by running it by itself: which operands it saves,
and what its backward allocates, frees and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.graph import Graph
from memfit.graph.solve import Solver
from memfit.trace.segments import Piece


def templated(
    graphs: dict[str, Graph],
    cut: Sequence[Mapping[str, Piece]],
    prefix: str,
    kinds: Sequence[str],
    solver: Solver,
    dtype: str,
) -> dict[str, Graph]:
    return graphs
