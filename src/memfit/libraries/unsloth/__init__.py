"""Unsloth's kernels put into transformers' code."""
