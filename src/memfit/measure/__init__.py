"""A job run for real, for a few steps, in a fresh process: what the allocator and the driver say of
it, as a Record.

The loops are those that the trace runs, on a real device: what is measured is what is traced.
"""

from memfit.measure.record import SCHEMA, Case, Record, read, write

__all__ = ["SCHEMA", "Case", "Record", "read", "write"]
