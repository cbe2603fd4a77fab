"""Solves the constants of `memfit.serving.llamacpp.speed` from published speeds, and prints them
with their errors: `python tools/llama_speed.py`, a minute.

Only sources of the fitted half are read for the constants (memfit.truth.llama_speed.held_out); each
source and GPU weighs the square root of its rows. The constants are changed one by one, in steps
that get smaller, while the mean of the logarithmic errors falls; an error counts as 50 % at most.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from memfit.errors import MemfitError  # noqa: E402
from memfit.hardware import GPU  # noqa: E402
from memfit.serving.llamacpp.prompts import (  # noqa: E402
    FIXED,
    PROMPTERS,
    Prompter,
    PromptWork,
    prompt_seconds,
    prompt_work,
    unknown,
)
from memfit.serving.llamacpp.speed import (  # noqa: E402
    READERS,
    Reader,
    Work,
    gpu_seconds,
    on_cpu,
    turns,
)
from memfit.truth.llama_speed import LlamaRow, Placed, place_row, read_llama_rows  # noqa: E402

MOST_SHARE, LARGEST_ERROR = 0.97, 0.5
Feature = tuple[LlamaRow, Work, GPU]
Prompt = tuple[LlamaRow, PromptWork, GPU]
F = TypeVar("F", Feature, Prompt)
R = TypeVar("R", Reader, Prompter)
SHARES = ("half", "packed", "cache", "cache_plain")


def placed_rows(backend: str, *, decoding: bool) -> Iterator[tuple[LlamaRow, Placed]]:
    """The rows of a backend on one GPU."""
    for row in read_llama_rows():
        if row.decoding is not decoding or row.gpus > 1:
            continue
        try:
            placed = place_row(row)
        except MemfitError:
            continue
        if not isinstance(placed, str) and placed.machine.backend.name == backend:
            yield row, placed


def features(backend: str) -> list[Feature]:
    """What one token of each row of a backend takes."""
    found = []
    for row, placed in placed_rows(backend, decoding=True):
        if on_cpu(placed.decoding.model, placed.decoding.places, placed.machine):
            continue
        works = placed.decoding.work(row.depth + row.tokens / 2)
        found.append((row, works[placed.machine.devices[0]], placed.gpu))
    return found


def error(feature: Feature, reader: Reader) -> float:
    row, work, gpu = feature
    seconds = gpu_seconds(work, gpu, reader, flash=row.flash, build=row.build)
    return math.log(1 / seconds / row.measured)


def solve(some: Sequence[F], start: R, error: Callable[[F, R], float], free: Sequence[str]) -> R:
    sizes = Counter((one[0].source, one[2].id) for one in some)
    weights = [1 / math.sqrt(sizes[one[0].source, one[2].id]) for one in some]

    def loss(rates: R) -> float:
        errors = (min(abs(error(one, rates)), LARGEST_ERROR) for one in some)
        return sum(w * e for w, e in zip(weights, errors, strict=True)) / sum(weights)

    best, step = loss(start), 0.2
    while step > 0.004:
        better = False
        for name in free:
            for factor in (1 + step, 1 / (1 + step)):
                value = getattr(start, name) * factor
                shares = SHARES if isinstance(start, Reader) else ()
                tried = start._replace(
                    **{name: min(value, MOST_SHARE) if name in shares else value}
                )
                if (found := loss(tried)) < best - 1e-6:
                    best, start, better = found, tried, True
        if not better:
            step /= 2
    return start


def shown(title: str, some: Sequence[F], rates: R, error: Callable[[F, R], float]) -> None:
    errors = [math.exp(error(one, rates)) - 1 for one in some]
    if not errors:
        return
    sizes = sorted(map(abs, errors))
    print(
        f"{title:44} {len(sizes):4} median {100 * sizes[len(sizes) // 2]:5.1f} "
        f"p95 {100 * sizes[-(-95 * len(sizes) // 100) - 1]:5.1f} "
        f"bias {100 * sorted(errors)[len(errors) // 2]:+6.1f}"
    )


def prompts(backend: str) -> list[Prompt]:
    """What one token of each prompt of a backend takes."""
    found = []
    for row, placed in placed_rows(backend, decoding=False):
        decoding = placed.decoding
        work = prompt_work(decoding.model, decoding.settings, row.tokens, row.depth)
        if unknown(work, placed.gpu, decoding.settings, PROMPTERS[backend]):
            continue
        found.append((row, work, placed.gpu))
    return found


def prompt_error(feature: Prompt, prompter: Prompter) -> float:
    row, work, gpu = feature
    seconds = prompt_seconds(work, gpu, prompter, flash=row.flash, build=row.build)
    return math.log(1 / seconds / row.measured)


Shared = tuple[LlamaRow, float, float, float]  # seconds of the GPU, bytes of the CPU, turns


def shared(backend: str) -> dict[str, list[Shared]]:
    """Rows of the fitted half in which the CPU computes layers or experts, by machine."""
    found: dict[str, list[Shared]] = {}
    for row in read_llama_rows():
        if not row.decoding or row.gpus > 1 or row.held_out:
            continue
        try:
            placed = place_row(row)
        except MemfitError:
            continue
        if isinstance(placed, str) or placed.machine.backend.name != backend:
            continue
        decoding, machine = placed.decoding, placed.machine
        if not on_cpu(decoding.model, decoding.places, machine):
            continue
        gpu, read = 0.0, 0.0
        for device, work in decoding.work(row.depth + row.tokens / 2).items():
            if device in machine.devices:
                gpu += gpu_seconds(
                    work, placed.gpu, READERS[backend], flash=row.flash, build=row.build
                )
            else:
                read += work.bytes
        one = (row, gpu, read, turns(decoding.model, decoding.places, machine))
        found.setdefault(row.source, []).append(one)
    return found


def solve_shared(backend: str) -> None:
    """Bytes per second that each machine's CPU reads, and the seconds of a turn."""

    def errors(some: list[Shared], host: float, turn: float) -> list[float]:
        return [
            math.log(1 / (gpu + read / host + count * turn) / row.measured)
            for row, gpu, read, count in some
        ]

    def best(some: list[Shared], turn: float) -> tuple[float, float]:
        hosts = [1e9 * 1.01**step for step in range(250, 480)]
        return min((sum(map(abs, errors(some, host, turn))), host) for host in hosts)

    machines = shared(backend)
    if not machines:
        return
    turn = min(
        (1e-6 * step for step in range(0, 400, 5)),
        key=lambda turn: sum(best(some, turn)[0] for some in machines.values()),
    )
    print(f"{backend} turn {1e6 * turn:.0f} us")
    for name, some in machines.items():
        host = best(some, turn)[1]
        print(f"  {name[-40:]}: {host / 1e9:.1f} GB/s", end=";")
        print(*(f"{100 * (math.exp(one) - 1):+.0f}" for one in errors(some, host, turn)))


def solve_decoding(backend: str) -> None:
    every = features(backend)
    fitted = [one for one in every if not one[0].held_out]
    held = [one for one in every if one[0].held_out]
    reader = solve(fitted, READERS[backend], error, Reader._fields)
    print(backend, ", ".join(f"{name} {value:.4g}" for name, value in reader._asdict().items()))
    for title, some in (("fitted", fitted), ("held out", held)):
        shown(title, some, reader, error)
        for gpu in sorted({(one[0].source, one[2].id) for one in some}):
            rows = [one for one in some if (one[0].source, one[2].id) == gpu]
            shown(f"  {gpu[0][-30:]} {gpu[1]}", rows, reader, error)


def solve_prompts(backend: str) -> None:
    every = prompts(backend)
    fitted = [one for one in every if not one[0].held_out]
    held = [one for one in every if one[0].held_out]
    free = [name for name in Prompter._fields if name not in FIXED[backend]]
    found = solve(fitted, PROMPTERS[backend], prompt_error, free)
    rates = ", ".join(f"{name} {value:.4g}" for name, value in found._asdict().items())
    print(backend, "prompts:", rates)
    for title, some in (("fitted", fitted), ("held out", held)):
        shown(title, some, found, prompt_error)
        for key in sorted({(one[0].source, one[2].id, one[0].model) for one in some}):
            rows = [one for one in some if (one[0].source, one[2].id, one[0].model) == key]
            shown(f"  {key[0][-12:]} {key[1]} {key[2][-16:]}", rows, found, prompt_error)


if __name__ == "__main__":
    for backend in sys.argv[1:] or READERS:
        solve_decoding(backend)
        solve_prompts(backend)
        solve_shared(backend)
