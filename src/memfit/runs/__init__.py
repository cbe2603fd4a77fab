"""Whole runs over texts of different lengths: the lengths, the batches, and memory over many
steps."""

from __future__ import annotations

from memfit.runs.batches import ORDERS, Batches, batches
from memfit.runs.lengths import Lengths, read_lengths
from memfit.runs.whole_run import whole_run

__all__ = ["ORDERS", "Batches", "Lengths", "batches", "read_lengths", "whole_run"]
