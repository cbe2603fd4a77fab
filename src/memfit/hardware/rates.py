"""What a GPU reaches of its figures: fractions that others measured, by the size of the work
(rates.json, written by tools/rates.py).

A GPU without measurements is estimated from similar GPUs, scaled by its best matrix product on
record; `Rates.origin` says which.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from math import log2
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from memfit.constants import counted, fitted, measured, vendor
from memfit.hardware.gpu import GPU, find_gpu
from memfit.hardware.link import find_link
from memfit.lazy_dataclass import dataclass

Reached = Mapping[
    int, tuple[tuple[int, float], ...]
]  # by the first key, (second key, fraction) in rising order
BACKWARD: Annotated[
    float,
    measured(
        "backward rate of attention, as a share of its forward rate",
        "FlashAttention-2, arXiv 2307.08691, abstract: the best on an A100",
    ),
] = 63 / 73
# What a second of a collective beside kernels costs them: it fills processors and moves memory.
SLOWED: Annotated[
    float,
    measured(
        "how much slower kernels are while a collective runs",
        "arXiv 2507.03114, abstract: the average of four A100, H100, MI210 and MI250",
    ),
] = 0.189
ONE_BY_ONE: Annotated[
    float,
    measured(
        "how much slower a step is where collectives and kernels take turns",
        "arXiv 2507.03114, abstract",
    ),
] = 0.102
BESIDE = SLOWED / ((1 + SLOWED) * (1 + ONE_BY_ONE) - 1)
FAST = ("nvlink", "xgmi")  # over PCIe a collective moves too little a second to be noticed
PINNED: Annotated[
    float,
    measured(
        "share of PCIe's rate that a copy from pinned memory reaches", "links.toml, pcie5-x16"
    ),
] = 55.06 / 63
# The kernels of a token: 56 a layer (norms 16, rotary 18, attention by SDPA's math path 9, products
# 5, writes into the cache 2, copies of heads 2, sums and SiLU 4), 12 around the layers, 13 to
# sample.
GPT_FAST: Annotated[
    int,
    counted(
        "kernels of a token of gpt-fast's Llama-7B, not compiled",
        "pytorch-labs/gpt-fast@3bcaaaf model.py, generate.py decode_n_tokens; each call of torch "
        "2.4's dispatcher that is not a view",
    ),
] = 32 * 56 + 12 + 13
FORWARD_KERNELS: Annotated[
    int,
    counted("kernels of Llama-3.2-1B's forward pass in transformers", "memfit's tape of that run"),
] = 633
STEP_KERNELS: Annotated[
    int,
    counted("kernels of its forward and backward with checkpoints", "memfit's tape of that run"),
] = 2224
LAUNCHES: Annotated[
    Mapping[int, float],
    fitted(
        "seconds that Python, torch's dispatch and the driver need for a kernel of code that is "
        "not compiled, on hosts of PCIe 4 and of PCIe 5",
        "25.5 tokens/s of Llama-7B on an A100, heavily bound by the CPU "
        "(pytorch.org/blog/accelerating-generative-ai-2); 8.1 ms of Llama-3.2-1B's forward pass "
        "over 512 tokens on a B200 (stas00/ml-engineering@744d01e "
        "training/performance/README.md)",
    ),
] = {4: 1 / 25.5 / GPT_FAST, 5: 8.1e-3 / FORWARD_KERNELS}
TRAINED: Annotated[
    float,
    fitted(
        "how much longer a kernel takes the host where gradients are wanted",
        "48.8 ms of the same model's forward and backward on that B200",
    ),
] = (48.8e-3 / STEP_KERNELS) / (8.1e-3 / FORWARD_KERNELS)
HOST: Annotated[
    Mapping[int, str],
    vendor(
        "the link to the host, by the GPU's architecture (first number of its compute capability)",
        "NVIDIA's data sheets of V100, A100, H100, B200 and their PCIe cards",
    ),
] = {
    6: "pcie3-x16",
    7: "pcie3-x16",
    8: "pcie4-x16",
    9: "pcie5-x16",
    10: "pcie5-x16",
    12: "pcie5-x16",
}


class Kernel(NamedTuple):
    """A kernel of attention, by the table that tells its rate, and that rate's share, forward and
    backward, that it has."""

    table: str
    forward: float
    backward: float


# what the table's engines ran: FlashAttention-3, cuDNN and their like on Hopper and Blackwell
NEWEST = Kernel("newest", 1.0, BACKWARD)
KERNELS: Annotated[
    Mapping[str, Kernel],
    measured(
        "attention kernels beside FlashAttention-2, by a job's option or the operator on the tape",
        "arXiv 2307.08691, section 4.1: 1.3 to 1.5 times as fast forward, twice as fast backward "
        "as the first version in Triton, twice as fast as xformers' cutlass kernel, which is "
        "torch's efficient attention",
    ),
] = {
    "flash-attn-3": NEWEST,
    "flash_attention": Kernel("flash_2", 1.0, BACKWARD),
    "flash_attention_triton": Kernel("flash_2", 1 / 1.4, BACKWARD / 2),
    "efficient_attention": Kernel("flash_2", 1 / 2, BACKWARD / 2),
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The time that kernels take on a GPU. `measured`: on this very GPU, not estimated from similar
    GPUs."""

    peak: Mapping[str, float] = field(repr=False)
    bandwidth: float
    matmul: Reached = field(repr=False)
    attention: Mapping[str, Reached] = field(
        repr=False
    )  # `newest`, and `flash_2`: FlashAttention-2, which knows nothing newer than an A100
    copy: float
    host: float | None  # bytes/s of copies from and to pinned memory of the host; None: not known
    taken: float  # seconds that kernels lose to a second of a collective beside them
    shared: bool  # such copies take the link that collectives take
    launch: float  # seconds of the smallest product that was measured: no kernel is quicker
    # seconds that the host needs for a kernel where nothing is compiled and no gradient is wanted
    eager: float
    measured: bool
    origin: str

    def rate(self, math: str) -> float:
        """Dense flop/s; of an arithmetic that the GPU does not have, that in which it is done
        instead: bf16 as fp32, fewer bits as 16."""
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

    def attended(
        self,
        kernel: Kernel,
        flops: float,
        moved: float,
        math: str,
        shape: tuple[int, int],
        *,
        backward: bool,
    ) -> float:
        """Seconds of fused attention, by head size and number of tokens."""
        width, length = shape
        table, rate = self.attention[kernel.table], self.rate(math)
        column = min(table, key=lambda one: abs(log2(one / max(width, 1))))
        reached = along(table[column], float(length)) * (
            kernel.backward if backward else kernel.forward
        )
        return max(self.launch, flops / rate / reached, self.moved(moved))

    def moved(self, moved: float) -> float:
        """Bytes that are read and written."""
        return max(self.launch, moved / (self.bandwidth * self.copy)) if moved > 0 else 0.0


@cache
def rates(gpu: GPU, library: str = "") -> Rates | None:
    """None where the GPU's own figures are not known. `library`: whose products they are, where
    that is known to matter: Transformer Engine's (`te`) add a matrix's gradient to a sum in fp32.
    """
    table = _table()
    best: dict[str, float] = table["best"]
    like = gpu.id if gpu.id in table["matmul"] else _like(gpu, best)
    if gpu.bandwidth is None or not gpu.rates or like is None:
        return None
    every = _by_first(table["matmul"][like]["reached"])
    products = (
        _by_first(table[library][like]["reached"]) if like in table.get(library, {}) else every
    )
    smallest = min(every)
    scale = best[gpu.id] / best[like] if gpu.id != like and gpu.id in best and like in best else 1.0
    return Rates(
        peak=gpu.rates,
        bandwidth=gpu.bandwidth,
        matmul=scaled(products, scale),
        attention={
            "newest": scaled(_by_first(table["attention"][like]["reached"]), scale),
            "flash_2": scaled(_by_first(_flash_2(table, like)), scale),
        },
        host=_host(gpu),
        taken=BESIDE if gpu.link is not None and gpu.link.kind in FAST else 0.0,
        shared=gpu.link is None or gpu.link.kind == "pcie",
        copy=table["copy"].get(gpu.id) or _copy(gpu),
        launch=2.0**smallest * 1e-6 / every[smallest][0][1],
        eager=LAUNCHES[5 if HOST.get(gpu.sm[0] if gpu.sm else 10) == "pcie5-x16" else 4],
        measured=like == gpu.id,
        origin=f"kernels measured on {find_gpu(like).name} ({table['source']})",
    )


def _flash_2(table: Mapping[str, Any], like: str) -> list[list[float]]:
    """On architectures up to Ada's it is what was measured; newer ones run it as an H100 does."""
    own = (find_gpu(like).sm or (0, 0)) < (9, 0)
    places: list[list[float]] = (
        table["attention"][like]["reached"] if own else table["flash_2"]["h100-sxm"]["reached"]
    )
    return places


def _like(gpu: GPU, best: Mapping[str, float]) -> str | None:
    """The measured GPU of the nearest architecture; of other vendors', where their best product is
    on record, the nearest in arithmetic whose best product is known as well."""
    known: dict[str, GPU] = {name: find_gpu(name) for name in _table()["matmul"]}
    if gpu.sm is None:
        alike = {
            name: abs(log2(gpu.rates["bf16"] / one.rates["bf16"]))
            for name, one in known.items()
            if name in best and "bf16" in gpu.rates
        }
        return min(alike, key=lambda name: alike[name]) if gpu.id in best and alike else None
    place = _place(gpu)
    return min(known, key=lambda name: abs(place - _place(known[name])))


def _place(gpu: GPU) -> int:
    major, minor = gpu.sm or (0, 0)
    return 10 * major + minor


def _host(gpu: GPU) -> float | None:
    """Over PCIe of the card's generation; a superchip has a link of its own, of which no copy was
    measured."""
    generation = HOST.get(gpu.sm[0]) if gpu.sm and gpu.form in ("sxm", "pcie") else None
    link = (
        gpu.link
        if gpu.link is not None and gpu.link.kind == "pcie"
        else find_link(generation)
        if generation
        else None
    )
    return None if link is None or link.bandwidth is None else PINNED * link.bandwidth


def _copy(gpu: GPU) -> float:
    """Of its bandwidth, as GPUs of its generation do; of all, where there is none."""
    known: dict[str, float] = _table()["copy"]
    own = [
        fraction
        for name, fraction in known.items()
        if (other := find_gpu(name)).sm and gpu.sm and other.sm[0] == gpu.sm[0]
    ]
    some = sorted(own or known.values())
    return (some[len(some) // 2] + some[(len(some) - 1) // 2]) / 2


@cache
def _table() -> dict[str, Any]:
    with (Path(__file__).parent / "rates.json").open("rb") as file:
        found: dict[str, Any] = json.load(file)
        return found


def scaled(reached: Reached, scale: float) -> Reached:
    return {
        first: tuple((second, fraction * scale) for second, fraction in row)
        for first, row in reached.items()
    }


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
    below, above = along(reached[low], second), along(reached[high], second)
    return below if low == high else below + (above - below) * (first - low) / (high - low)


def along(row: tuple[tuple[int, float], ...], place: float) -> float:
    """Between the two nearest places; beyond the row its end."""
    at = bisect_right(row, (place, 2.0))
    (low, below), (high, above) = row[max(at - 1, 0)], row[min(at, len(row) - 1)]
    return (
        below
        if low == high
        else below + (above - below) * (min(max(place, low), high) - low) / (high - low)
    )
