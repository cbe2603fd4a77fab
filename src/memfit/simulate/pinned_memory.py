"""What activations take of the host: pinned blocks, by torch's allocator for them."""

from __future__ import annotations

from collections import Counter

from memfit.tape import Comm, Mark, Tape


def parked(tape: Tape, *, together: bool = False) -> int:
    """Blocks are as large as the next power of two, and none is given back while the run goes on:
    as many of each size as were ever wanted at once (torch 2.13
    aten/src/ATen/core/CachingHostAllocator.h). A forward begins with none, for what nobody asked
    for again has gone by then; where micro-batches are under way `together`, as in a pipeline, the
    first of a step does."""
    live: Counter[int] = Counter()
    most: Counter[int] = Counter()
    phase, step = "", -1
    for event in tape:
        if type(event) is Mark:
            if event.phase == "forward" and (
                event.step != step if together else phase != "forward"
            ):
                live.clear()
                step = event.step
            phase = event.phase
        elif (
            type(event) is Comm
            and event.group == "host"
            and event.op in ("to_host", "to_device")
            and event.size
        ):
            size = 1 << (event.size - 1).bit_length()
            live[size] += 1 if event.op == "to_host" else -1
            most[size] = max(most[size], live[size])
    return sum(size * count for size, count in most.items())


__all__ = ["parked"]
