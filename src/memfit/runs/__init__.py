"""A whole run over texts of different lengths: how long they are, which batches they make, and what
many steps of such batches do to a GPU's memory."""

from __future__ import annotations

from memfit.runs.batches import ORDERS, Batches, batches
from memfit.runs.lengths import Lengths, read_lengths
from memfit.runs.whole_run import whole_run

__all__ = ["ORDERS", "Batches", "Lengths", "batches", "read_lengths", "whole_run"]
