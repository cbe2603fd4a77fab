"""Packs the captured graphs for the wheel: one compressed file for each family, a third of the size
of one for each setting. A checkout and the sdist keep them as JSON."""

from __future__ import annotations

import json
import lzma
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GRAPHS = "memfit/libraries/transformers/graphs"


class PackGraphs(BuildHookInterface[Any]):
    folder: Path

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp())
        if version == "editable":
            return
        for name, settings in families(Path(self.root, "src", GRAPHS)).items():
            packed = self.folder / f"{name}.xz"
            packed.write_bytes(pack(settings))
            build_data["force_include"][str(packed)] = f"{GRAPHS}/{packed.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self.folder)


def families(folder: Path) -> dict[str, dict[str, Path]]:
    """The files of each family, by setting."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("*.json")):
        name, _, setting = path.stem.partition(".")
        found.setdefault(name, {})[setting] = path
    return found


def pack(settings: dict[str, Path]) -> bytes:
    """A first line with the names of the settings, then a line of JSON for each."""
    graphs = (json.loads(path.read_text(encoding="utf-8")) for path in settings.values())
    lines = [json.dumps(one, separators=(",", ":")) for one in (list(settings), *graphs)]
    return lzma.compress("\n".join(lines).encode(), preset=9)
