"""Liger-Kernel: Triton kernels put into transformers' code."""
