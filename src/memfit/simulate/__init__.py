"""Readers of a Tape: what it needs in memory, what it takes in time."""
