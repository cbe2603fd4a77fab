"""How fast a tape is replayed: synthetic tapes shaped like training steps of a decoder, with the
lifetimes that autograd gives them. Usage: python bench/allocator.py [events]"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from memfit.simulate.replay import Replay, replay
from memfit.simulate.settings import Settings
from memfit.tape import Alloc, Event, Free, Mark, Tape

RUNS = 7


class Tensors:
    """Writes the events; tensors are named by their id."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.count = 0

    def make(self, *sizes: int) -> list[int]:
        ids = range(self.count, self.count + len(sizes))
        self.events.extend(
            Alloc(id, size, "activations") for id, size in zip(ids, sizes, strict=True)
        )
        self.count += len(sizes)
        return list(ids)

    def drop(self, ids: list[int]) -> None:
        self.events.extend(Free(id) for id in ids)
        ids.clear()


def training(
    events: int, *, tokens: int, width: int, wide: int, vocabulary: int, layers: int, rank: int = 0
) -> Tape:
    """Steps of a decoder in bf16 with AdamW until there are enough events; `rank` > 0: frozen
    weights and LoRA on four projections, whose adapters are fp32 and cast for every product."""
    tape = Tensors()
    hidden, inner, row = tokens * width * 2, tokens * wide * 2, tokens * 4
    weights = [
        2 * size
        for size in (
            width,
            width * width,
            width * width // 4,
            width * width // 4,
            width * width,
            width,
        )
    ]
    weights += [2 * width * wide] * 3
    adapters = [4 * rank * width] * 8 if rank else []
    trained = adapters or weights
    tape.events.append(Mark("load"))
    for _ in range(layers):
        tape.make(*weights, *adapters)
    tape.make(2 * vocabulary * width, 2 * vocabulary * width)
    step = 0
    while len(tape.events) < events:
        tape.events.append(Mark("forward", step=step))
        saved = [_forward(tape, hidden, inner, row, tokens * rank * 4) for _ in range(layers)]
        logits = tape.make(
            hidden, tokens * vocabulary * 2, tokens * vocabulary * 4, tokens * vocabulary * 4, 4
        )
        tape.events.append(Mark("backward", step=step))
        grads = tape.make(tokens * vocabulary * 2, hidden)
        tape.drop(logits)
        gradients: list[int] = []
        while saved:
            _backward(tape, saved.pop(), hidden, inner, row)
            gradients += tape.make(*trained)
            tape.drop(tape.make(hidden))
        tape.drop(grads)
        tape.events.append(Mark("step", step=step))
        if step == 0:
            for _ in range(layers):
                tape.make(*(size for size in trained for _ in range(2)), *([4] * len(trained)))
        for start in range(0, len(gradients), 64):
            tape.drop(tape.make(*trained * (min(64, len(gradients) - start) // len(trained))))
        tape.drop(gradients)
        step += 1
    return Tape(events=tuple(tape.events), source="handwritten")


def _forward(tape: Tensors, hidden: int, inner: int, row: int, adapter: int) -> list[int]:
    saved: list[int] = []
    norm, projections, attention, mlp = (
        (hidden * 2, row),
        (hidden, hidden // 4, hidden // 4),
        (hidden, row * 32, hidden),
        (inner, inner, inner),
    )
    for sizes in (norm, projections, attention, norm, mlp):
        temporary = tape.make(sizes[0], 512)
        saved += tape.make(*sizes)
        if adapter:
            saved += tape.make(adapter, adapter // 2)
            tape.drop(tape.make(sizes[0], sizes[0]))
        tape.drop(temporary)
    return saved


def _backward(tape: Tensors, saved: list[int], hidden: int, inner: int, row: int) -> None:
    for sizes in (
        (inner, inner),
        (hidden, hidden),
        (hidden * 2, row),
        (hidden, hidden // 4, hidden // 4),
        (hidden, row * 32),
    ):
        grads = tape.make(*sizes)
        tape.drop(tape.make(sizes[-1], sizes[0]))
        for _ in range(min(len(saved), 4)):
            tape.drop([saved.pop()])
        tape.drop(grads)
    tape.drop(saved)


def clock(run: Callable[[], Replay]) -> tuple[float, Replay]:
    answer, times = run(), []
    for _ in range(RUNS):
        start = time.perf_counter()
        answer = run()
        times.append(time.perf_counter() - start)
    return statistics.median(times), answer


def main(events: int) -> None:
    llama = {"tokens": 8192, "width": 4096, "wide": 14336, "vocabulary": 128256, "layers": 32}
    tiny = {"tokens": 512, "width": 576, "wide": 1536, "vocabulary": 49152, "layers": 30}
    tapes = {
        "8B, full": training(events, **llama),
        "8B, LoRA": training(events, **llama, rank=16),
        "135M, short": training(events, **tiny),
        "135M, LoRA": training(events, **tiny, rank=8),
    }
    expandable = Settings(expandable_segments=True)
    print(
        f"{'tape':<14}{'options':<12}{'events':>9}{'seconds':>10}{'events/s':>12}{'us/event':>10}"
        f"{'reserved':>14}{'segments':>10}"
    )
    for name, tape in tapes.items():
        for options, settings in (("default", Settings()), ("expandable", expandable)):
            seconds, answer = clock(lambda tape=tape, settings=settings: replay(tape, settings))  # type: ignore[misc]
            rate = len(tape) / seconds
            print(
                f"{name:<14}{options:<12}{len(tape):>9,}{seconds:>10.4f}{rate:>12,.0f}"
                f"{1e6 / rate:>10.2f}"
                f"{answer.peak_reserved / 2**30:>10.2f} GiB{len(answer.segments):>10}"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
