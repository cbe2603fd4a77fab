"""Layouts of the work over GPUs, in a folder each: checks, and what happens around the model."""
