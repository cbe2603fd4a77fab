"""docs/classes.md says what the registry of families and the table of refusals say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    not transformers.__version__.startswith("5.23"), reason="the page is of transformers 5.23"
)
def test_the_page_has_not_drifted() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "classes.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
