"""What a GPU reaches of its figures: fractions that others measured, by the size of the work (rates.json, written by tools/rates.py).

A GPU that nobody measured is taken to reach what one of its kind does, as much more or less as its best matrix product on record says;
`Rates.origin` says which."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import log2
from pathlib import Path
from statistics import median
from typing import Any

from memfit.hardware.gpu import GPU, find_gpu

Reached = Mapping[int, tuple[tuple[int, float], ...]]  # by the first key, (second key, fraction) in rising order
# The GPU that stands for others of its architecture: the nearest at or below theirs.
_LIKE = {(7, 0): "a100-sxm-80gb", (8, 0): "a100-sxm-80gb", (8, 6): "l40s", (8, 7): "l40s", (8, 9): "l40s", (9, 0): "h100-sxm",
         (10, 0): "b200", (10, 3): "b300", (12, 0): "rtx-pro-6000-server"}  # fmt: skip
BACKWARD = 63 / 73  # of attention's forward rate (FlashAttention-2, arXiv 2307.08691, abstract: the best on an A100)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds that kernels take on a GPU. `measured`: on this very GPU, not on one of its kind."""

    peak: Mapping[str, float] = field(repr=False)
    bandwidth: float
    matmul: Reached = field(repr=False)
    attention: Reached = field(repr=False)
    flash_2: Reached = field(repr=False)  # the same of FlashAttention-2, which knows nothing newer than an A100
    copy: float
    launch: float  # seconds of the smallest product that was measured: no kernel is quicker
    measured: bool
    origin: str

    def rate(self, math: str) -> float:
        """Dense flop/s; of an arithmetic that the GPU does not have, that in which it is done instead: bf16 as fp32, fewer bits as 16."""
        instead = ("fp32",) if math == "bf16" else ("bf16", "fp16", "fp32")
        return self.peak.get(math) or next(self.peak[one] for one in instead if one in self.peak)

    def product(self, flops: float, moved: float, math: str) -> float:
        """A matrix product."""
        rate = self.rate(math)
        shortest = max(flops / rate, moved / self.bandwidth)
        if shortest <= 0:
            return 0.0
        intensity = log2(max(flops, 1) / max(moved, 1) / (rate / self.bandwidth))
        return max(self.launch, shortest / _between(self.matmul, log2(shortest * 1e6), intensity))

    def attended(self, flops: float, moved: float, math: str, width: int, length: int, *, backward: bool, flash_2: bool = False) -> float:
        """Fused attention over heads of `width`."""
        table = self.flash_2 if flash_2 else self.attention
        rate = self.rate(math)
        column = min(table, key=lambda one: abs(log2(one / max(width, 1))))
        reached = _along(table[column], float(length)) * (BACKWARD if backward else 1)
        return max(self.launch, flops / rate / reached, self.moved(moved))

    def moved(self, moved: float) -> float:
        """Bytes that are read and written."""
        return max(self.launch, moved / (self.bandwidth * self.copy)) if moved > 0 else 0.0


def rates(gpu: GPU) -> Rates | None:
    """None where the GPU's own figures are not known."""
    table = _table()
    best: dict[str, float] = table["best"]
    like = gpu.id if gpu.id in table["matmul"] else _like(gpu, best)
    if gpu.bandwidth is None or not gpu.rates or like is None:
        return None
    products = _by_first(table["matmul"][like]["reached"])
    smallest = min(products)
    scale = best[gpu.id] / best[like] if gpu.id != like and gpu.id in best and like in best else 1.0
    return Rates(
        peak=gpu.rates,
        bandwidth=gpu.bandwidth,
        matmul=scaled(products, scale),
        attention=scaled(_by_first(table["attention"][like]["reached"]), scale),
        flash_2=scaled(_by_first(_flash_2(table, like)), scale),
        copy=table["copy"].get(gpu.id) or _copy(gpu),
        launch=2.0**smallest * 1e-6 / products[smallest][0][1],
        measured=like == gpu.id,
        origin=f"kernels measured on {find_gpu(like).name} ({table['source']})",
    )


def _flash_2(table: Mapping[str, Any], like: str) -> list[list[float]]:
    """On architectures up to Ada's it is what was measured; newer ones run it as an H100 does."""
    own = (find_gpu(like).sm or (0, 0)) < (9, 0)
    places: list[list[float]] = table["attention"][like]["reached"] if own else table["flash_2"]["h100-sxm"]["reached"]
    return places


def _like(gpu: GPU, best: Mapping[str, float]) -> str | None:
    """The measured GPU of its architecture, or of the next older one; for other vendors' one whose best product is on record, too."""
    if gpu.sm is None:
        return "h100-sxm" if gpu.id in best else None
    return next((name for sm, name in reversed(_LIKE.items()) if sm <= gpu.sm), None)


def _copy(gpu: GPU) -> float:
    """Of its bandwidth, as GPUs of its generation do; of all, where there is none."""
    known: dict[str, float] = _table()["copy"]
    own = [fraction for name, fraction in known.items() if (other := find_gpu(name)).sm and gpu.sm and other.sm[0] == gpu.sm[0]]
    return float(median(own or known.values()))


@cache
def _table() -> dict[str, Any]:
    with (Path(__file__).parent / "rates.json").open("rb") as file:
        found: dict[str, Any] = json.load(file)
        return found


def scaled(reached: Reached, scale: float) -> Reached:
    return {first: tuple((second, fraction * scale) for second, fraction in row) for first, row in reached.items()}


def _by_first(places: list[list[float]]) -> Reached:
    found: dict[int, list[tuple[int, float]]] = {}
    for first, second, fraction in sorted(places):
        found.setdefault(int(first), []).append((int(second), fraction))
    return {first: tuple(row) for first, row in found.items()}


def _between(reached: Reached, first: float, second: float) -> float:
    """Between the two nearest rows; beyond the table its edge."""
    keys = list(reached)
    at = bisect_right(keys, first)
    low, high = keys[max(at - 1, 0)], keys[min(at, len(keys) - 1)]
    below, above = _along(reached[low], second), _along(reached[high], second)
    return below if low == high else below + (above - below) * (first - low) / (high - low)


def _along(row: tuple[tuple[int, float], ...], place: float) -> float:
    at = bisect_right(row, (place, 2.0))
    (low, below), (high, above) = row[max(at - 1, 0)], row[min(at, len(row) - 1)]
    return below if low == high else below + (above - below) * (min(max(place, low), high) - low) / (high - low)
