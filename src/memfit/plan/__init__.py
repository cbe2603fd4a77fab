"""Ranked answers: what fits, what fits best."""
