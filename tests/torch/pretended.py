"""Where a test and the script that it runs meet: what is to be measured, and what came out."""

from __future__ import annotations

from typing import Any

from memfit.measure.record import Case

ASKED: list[Case] = []
FOUND: list[dict[str, Any]] = []
