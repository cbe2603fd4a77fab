"""What a traced script would have left on the disk, and what might still reach it."""

from __future__ import annotations

import os
import stat
from typing import Any

from memfit.trace.sandbox import Sandbox

sizes: dict[int, int] = {}  # of files that were only said to be saved, by their inodes
MOST = 1000
# Written for every program, whatever it does.
USUAL = ("__pycache__", ".nv", ".triton")


def saved(path: Any, size: int) -> None:
    """An empty file at `path` stands for one of `size` bytes, wherever it is moved."""
    sizes[os.stat(path).st_ino] = size


def files(root: str) -> list[dict[str, Any]]:
    """Those below `root`, which stands for `/`: the largest first, paths as they are seen from
    here."""
    here = os.getcwd() + os.sep
    found: list[tuple[int, str]] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [one for one in inner if one not in USUAL]
        for name in names:
            path = os.path.join(folder, name)
            state = os.lstat(path)
            if stat.S_ISREG(state.st_mode):
                seen = path.removeprefix(root)
                size = state.st_size or sizes.get(state.st_ino, 0)
                found.append((-size, seen.removeprefix(here)))
    return [{"path": path, "size": -size} for size, path in sorted(found)[:MOST]]


def gaps(found: Sandbox) -> str:
    """What this machine's isolation leaves open; nothing where the operating system does it."""
    why = f" ({found.why})" if found.why else ""
    if found.level == "namespaces":
        return ""
    if found.level == "landlock":
        return (
            f"Landlock, without namespaces{why}: what native code writes is refused, and so stops "
            "the script" + ("; the network is open" if found.network else "")
        )
    return (
        f"Python's own functions alone{why}: what native code writes (tokenizers, sqlite, parquet) "
        "is really written, programs that it starts really run, the network is open"
    )


__all__ = ["files", "gaps", "saved"]
