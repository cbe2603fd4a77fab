"""What one layer computes, as data: values with their shapes and last use, operations with what
they read, save and allocate. Captured from a library's own code, checked, stored as JSON."""

from __future__ import annotations

from memfit.graph.dims import Dims, Expression, evaluated, expression
from memfit.graph.layer import Graph, Loop, Op, Template, Value, check, graph_of, json_of
from memfit.graph.loops import unrolled

__all__ = [
    "Dims",
    "Expression",
    "Graph",
    "Loop",
    "Op",
    "Template",
    "Value",
    "check",
    "evaluated",
    "expression",
    "graph_of",
    "json_of",
    "unrolled",
]
