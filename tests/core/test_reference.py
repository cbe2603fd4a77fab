"""The reference pages are what the program's own tables say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from memfit.report import codec
from memfit.words.options import options

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"


def test_the_pages_have_not_drifted() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "reference.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_option_and_every_key_is_on_its_page() -> None:
    job, keys, flags = (
        (FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in ("job", "json", "cli")
    )
    assert [name for name in options() if f"| `{name}` |" not in job] == []
    assert [path for path, _, _ in codec.FIELDS if f"| `{path}` |" not in keys] == []
    assert [
        name for name in options() if name != "model" and f"--{name.replace('_', '-')}" not in flags
    ] == []


def test_the_schema_file_is_a_schema() -> None:
    schema = json.loads((FOLDER / "estimate.schema.json").read_text(encoding="utf-8"))
    assert schema == codec.schema()
    assert schema["properties"]["memory"]["properties"]["parts"] == {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "description": next(meaning for path, _, meaning in codec.FIELDS if path == "memory.parts"),
    }
