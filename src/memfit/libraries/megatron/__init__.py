"""Megatron-Core with TransformerEngine: its own models, split over ranks."""
