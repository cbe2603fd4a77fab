"""Measured kernels of other people -> `src/memfit/hardware/rates.json`: what fraction of its limits
a GPU reaches, by the size of the work, and `collectives.json`: how long collectives take within a
node, by their size.

    python tools/rates.py FOLDER        (needs pyarrow)

FOLDER/<system>/{gemm,attention,nccl}.<engine>.<version>.parquet are the files `gemm_perf`,
`context_attention_perf` and `nccl_perf` of ai-dynamo/aiconfigurator@095f58a (Apache-2.0),
systems/data. A matrix product's place in the table is its shortest time by the vendor's figures
(arithmetic or memory, whichever is slower) and its intensity as a multiple of the GPU's own; each
engine counts alike. `gemm.te.json`, where there is one, is MooreThreads/SimuMax@4dcaae5
configs/system (Apache-2.0): Transformer Engine's products in the three layouts of a training step,
75 in a row, and those of experts. They are a table of their own, and one machine of two.

A run of hours is as fast as the power limit allows. A collector's loop is nine times the kernel:
where that is shorter than the limit's own control, the clock is higher than it stays. What products
of `LONG` reach is therefore the most that any product of that engine is taken to reach, and where
two projects measured a GPU, the mean of what they found to last: their machines differ. vLLM's
products are left out: its collector leaves the weights as they were allocated
(collector/vllm/collect_gemm.py, `TODO, to evaluate random weights impact`), and its products are up
to a fifth faster than those of the others, on random numbers. That they were zeros, on which a GPU
draws little, is a guess.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from memfit.hardware import GPU, find_gpu

SYSTEMS = {
    "a100_sxm": "a100-sxm4-80gb",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000-server",
}
TARGET = Path(__file__).resolve().parents[1] / "src/memfit/hardware/rates.json"
SOURCE = "ai-dynamo/aiconfigurator@095f58a aic-core/src/aiconfigurator_core/systems/data"
STREAM = {  # GB/s of a triad at its best, te42kyfo/gpu-benches@1c36d50 gpu-stream/*.txt
    "v100-sxm2-16gb": 812,
    "a100-sxm-40gb": 1363,
    "a100-sxm-80gb": 1759,
    "h100-pcie": 1832,
    "h200": 3534,
    "l40": 768,
    "a40": 655,
    "mi210": 1248,
}
# TFLOP/s of FlashAttention-2's forward on an H100 SXM, by width of heads and length: figure 5 of
# the FlashAttention-3 paper (arXiv 2407.08608), as others read it from the bars. Causal; of width
# 128 only the other kind was read, taken down by as much as width 64 loses.
FLASH_2: dict[int, dict[int, float]] = {
    64: {512: 180, 1024: 229, 2048: 262, 4096: 284, 8192: 295, 16384: 299},
    128: {
        512: 309 * 180 / 282,
        1024: 350 * 229 / 306,
        2048: 362 * 262 / 318,
        4096: 368 * 284 / 321,
        8192: 370 * 295 / 322,
        16384: 370 * 299 / 324,
    },
    256: {512: 208, 1024: 251, 2048: 278, 4096: 293, 8192: 297, 16384: 298},
}
BEST = {  # TFLOP/s of the best 16-bit product found by search, mag-/gpu_benchmark@93322b7 README.md
    "a10g": 69.7,
    "rtx-3090": 78.0,
    "rtx-3090-ti": 86.0,
    "l4": 91.4,
    "rtx-a5000": 93.9,
    "v100-sxm2-32gb": 94.0,
    "v100-sxm2-16gb": 96.1,
    "rtx-a6000": 131.2,
    "mi210": 142.8,
    "l40": 170.3,
    "rtx-4090": 178.8,
    "l40s": 252.0,
    "rtx-6000-ada": 278.5,
    "a100-pcie-80gb": 256.4,
    "a100-sxm-80gb": 267.9,
    "h100-nvl": 488.5,
    "h100-pcie": 499.5,
    "mi300x": 788.2,
    "h100-sxm": 821.2,
    "gh200-96gb": 852.5,
}
BF16, FP32 = 2, 4  # bytes
# Not the L40S's: eight of them on that machine reach 1.2 GB/s, which says more of the machine than
# of PCIe.
LINKS = {
    "a100_sxm": "nvlink3",
    "h100_sxm": "nvlink4",
    "b200_sxm": "nvlink5",
    "rtx_pro_6000_server": "pcie5-x16",
}
OPS = {"alltoall": "all_to_all"}  # as a tape calls them
BYTES = range(9, 30, 2)  # log2 of a call's size
LONG, BIG = (
    16e-3,
    2048,
)  # seconds of a product, and each of its sides, whose loop ran at the clock that lasts
LOOP, ROW = 9, 75  # products in the collectors' loop, and in SimuMax's
SIZES, INTENSITIES = (
    range(-3, 18),
    range(-8, 7),
)  # log2 of the shortest time in us, and of the intensity over the GPU's own
LENGTHS, HEADS = (256, 512, 1024, 2048, 4096, 8192, 16384), (64, 128, 256)


def read(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    yield from pyarrow.parquet.read_table(path).to_pylist()


def limits(gpu: GPU) -> tuple[float, float]:
    assert gpu.bandwidth is not None
    return gpu.rates["bf16"], gpu.bandwidth


def products(path: Path) -> Iterator[tuple[int, int, int, float]]:
    """(m, n, k, seconds) of every product of 16-bit numbers."""
    if path.suffix == ".json":
        yield from ((m, n, k, seconds) for m, n, k, seconds, _ in dense(path))
        return
    for row in read(path):
        if row["gemm_dtype"] == "bfloat16":
            yield int(row["m"]), int(row["n"]), int(row["k"]), float(row["latency"]) / 1e3


def written(path: Path, op: str) -> Iterator[tuple[dict[str, str], float, float]]:
    """(what was measured, the fraction reached, of how many flop/s) in a table of SimuMax."""
    table = json.loads(path.read_text())["accelerator"]["op"][op]
    for shape, reached in table["accurate_efficient_factor"].items():
        yield dict(part.split("=") for part in shape.split(", ")), reached, table["tflops"] * 1e12


def dense(path: Path) -> Iterator[tuple[int, int, int, float, bool]]:
    """The last: whether it adds to a sum in fp32, as a matrix's gradient does."""
    for sides, reached, rate in written(path, "matmul"):
        batch, m, n, k = (int(sides[key]) for key in "bmnk")
        if batch == 1:
            yield m, n, k, 2 * m * n * k / (reached * rate), sides["accumulate"] == "True"


def experts(path: Path) -> Iterator[tuple[int, int, int, float, bool]]:
    """One of them each."""
    for sides, reached, rate in written(path, "group_matmul"):
        m, n, k = (int(sides[key]) for key in "MNK")
        if sides["stage"] == "bwd_grad_w":
            m, k = k, m
        if sides["main_grad_dtype"] == "fp32":
            yield m, n, k, 2 * m * n * k / (reached * rate), sides["stage"] == "bwd_grad_w"


def trained(gpu: GPU, path: Path) -> dict[tuple[int, int], list[float]]:
    """Products of a training step under Transformer Engine."""
    rate, bandwidth = limits(gpu)
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for m, n, k, seconds, summed in (*dense(path), *experts(path)):
        flops, moved = (
            2 * m * n * k,
            BF16 * (m * k + k * n) + (2 * FP32 if summed else BF16) * m * n,
        )
        shortest = max(flops / rate, moved / bandwidth)
        found[
            round(math.log2(shortest * 1e6)), round(math.log2(flops / moved / (rate / bandwidth)))
        ].append(shortest / seconds)
    return found


def lasting(gpu: GPU, path: Path) -> float:
    """What the products reach whose loop lasted; 1 where there are few."""
    rate, _ = limits(gpu)
    least = LONG * (LOOP / ROW if path.suffix == ".json" else 1)
    found = [
        2 * m * n * k / seconds / rate
        for m, n, k, seconds in products(path)
        if seconds >= least and min(m, n, k) >= BIG
    ]
    return statistics.median(found) if len(found) >= 8 else 1.0


def matmul(gpu: GPU, path: Path, most: float) -> dict[tuple[int, int], list[float]]:
    """`most`: what lasts on this GPU."""
    rate, bandwidth = limits(gpu)
    most = min(most, lasting(gpu, path))
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for m, n, k, seconds in products(path):
        flops, moved = 2 * m * n * k, BF16 * (m * k + k * n + m * n)
        shortest = max(flops / rate, moved / bandwidth)
        place = (
            round(math.log2(shortest * 1e6)),
            round(math.log2(flops / moved / (rate / bandwidth))),
        )
        if place[0] in SIZES and place[1] in INTENSITIES:
            reached = shortest / seconds
            found[place].append(min(reached, most) if shortest == flops / rate else reached)
    return found


def attention(gpu: GPU, path: Path) -> dict[tuple[int, int], list[float]]:
    """Causal prefill without a window or cached tokens, long enough that its launch does not
    show."""
    rate, _ = limits(gpu)
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in read(path):
        length, width = int(row["isl"]), int(row["head_dim"])
        plain = (
            row["attn_dtype"] == row["kv_cache_dtype"] == "bfloat16"
            and not int(row.get("window_size") or 0)
            and not int(row.get("step") or 0)
        )
        if not plain or length not in LENGTHS or width not in HEADS:
            continue
        shortest = 2 * int(row["batch_size"]) * int(row["num_heads"]) * width * length**2 / rate
        if shortest >= 64e-6:
            found[width, length].append(shortest / (float(row["latency"]) / 1e3))
    return found


def pooled(engines: list[dict[tuple[int, int], list[float]]]) -> dict[tuple[int, int], float]:
    """The median of the engines' medians."""
    medians: dict[tuple[int, int], list[float]] = defaultdict(list)
    for engine in engines:
        for place, values in engine.items():
            medians[place].append(statistics.median(values))
    return {place: round(statistics.median(values), 3) for place, values in sorted(medians.items())}


def collectives(path: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds by collective and number of GPUs, for each of `BYTES`; a message's size is counted in
    values of two bytes."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    rows = {
        (row["op_name"], int(row["num_gpus"]), int(row["message_size"])): row
        for row in read(path)
        if row["nccl_dtype"] == "half"
    }
    for op, gpus in sorted({key[:2] for key in rows}):
        for size in BYTES:
            found[OPS.get(op, op)][str(gpus)].append(
                round(float(rows[op, gpus, 2**size // BF16]["latency"]) / 1e3, 8)
            )
    return found


def main(folder: Path) -> int:
    calls = {
        name: collectives(next((folder / system).glob("nccl.*.parquet")))
        for system, name in LINKS.items()
    }
    nccl = {
        "source": f"{SOURCE}/<system>/comm/nccl, 16-bit values",
        "bytes": [2**size for size in BYTES],
        "seconds": calls,
    }
    (TARGET.parent / "collectives.json").write_text(
        json.dumps(nccl, separators=(",", ":")).replace("],", "],\n") + "\n"
    )
    rates: dict[str, Any] = {
        "source": SOURCE,
        "matmul": {},
        "te": {},
        "attention": {},
        "flash_2": {},
        "copy": {},
        "best": {},
    }
    old = find_gpu("h100-sxm")
    places = [
        [width, length, round(rate * 1e12 / old.rates["bf16"], 3)]
        for width, row in FLASH_2.items()
        for length, rate in row.items()
    ]
    rates["flash_2"][old.id] = {"reached": places}
    for name, best in BEST.items():
        gpu = find_gpu(name)
        rates["best"][gpu.id] = round(best * 1e12 / gpu.rates.get("bf16", gpu.rates["fp16"]), 3)
    for name, measured in STREAM.items():
        gpu = find_gpu(name)
        rates["copy"][gpu.id] = round(measured * 1e9 / (gpu.bandwidth or math.nan), 3)
    for system, name in SYSTEMS.items():
        gpu = find_gpu(name)
        files = sorted(
            path
            for path in (folder / system).glob("*.parquet")
            if not path.name.startswith(("gemm.vllm", "nccl."))
        )
        most = 1.0
        for path in (folder / system).glob("gemm.te.json"):
            rates["te"][gpu.id] = {
                "reached": [
                    [*place, value] for place, value in pooled([trained(gpu, path)]).items()
                ]
            }
            most = (
                lasting(gpu, path)
                + statistics.median(
                    lasting(gpu, one) for one in files if one.name.startswith("gemm.")
                )
            ) / 2
        for kind, measure in (("matmul", partial(matmul, most=most)), ("attention", attention)):
            prefix = "gemm" if kind == "matmul" else kind
            found = pooled(
                [measure(gpu, path) for path in files if path.name.startswith(f"{prefix}.")]
            )
            engines = [
                path.stem.removeprefix(f"{prefix}.")
                for path in files
                if path.name.startswith(f"{prefix}.")
            ]
            rates[kind][gpu.id] = {
                "engines": engines,
                "reached": [[*place, value] for place, value in found.items()],
            }
    TARGET.write_text(json.dumps(rates, separators=(",", ":")).replace('],"', '],\n"') + "\n")
    print(TARGET.stat().st_size, "bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
