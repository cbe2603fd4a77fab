"""Engines whose cache is a fraction of the memory, in less detail than vLLM's: weights as one rank
holds them, the largest step, and the engine's own rule for the rest.

Each engine is a file: its flags, its defaults, and how many bytes its cache gets.
"""
