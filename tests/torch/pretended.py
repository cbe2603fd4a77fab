"""A process of its own for what is measured on a pretended GPU (what a followed script puts in
torch's place stays there), and where it and the script meet: what is to be measured, and what came
out."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from memfit.measure.record import Case
from memfit.trace.script import Request, follow

ASKED: list[Case] = []
FOUND: list[dict[str, Any]] = []


def pretended(case: Case, **request: Any) -> dict[str, Any]:
    """`request`: the fields of a `Request`."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(_followed, case, request).result()


def _followed(case: Case, request: dict[str, Any]) -> dict[str, Any]:
    ASKED.append(case)
    follow(Request(**request))
    return FOUND.pop()


__all__ = ["ASKED", "FOUND", "pretended"]
