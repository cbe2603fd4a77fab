"""Tensor parallelism: each rank has a part of every matrix."""
