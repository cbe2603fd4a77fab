"""What the installed versions call the same thing."""

from __future__ import annotations

import importlib.metadata


def installed(library: str) -> tuple[int, int]:
    """(major, minor); (0, 0) where it is not installed."""
    try:
        major, minor = importlib.metadata.version(library).split(".")[:2]
        return int(major), int(minor)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return 0, 0


TRANSFORMERS = installed("transformers")
DTYPE = "dtype" if TRANSFORMERS >= (4, 56) else "torch_dtype"  # the argument of `from_config` and `_from_config`

__all__ = ["DTYPE", "TRANSFORMERS", "installed"]
