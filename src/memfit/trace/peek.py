"""`python -m memfit.trace.peek CONFIG.json --batch 1 --seq 128`: the traced peak and what is alive
then."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from memfit.job import job_from
from memfit.tape import Alloc, Free, Mark, Tape


def say(text: object) -> None:
    sys.stdout.write(f"{text}\n")


def rounded(size: int) -> int:
    return -(-size // 512) * 512


def peak(tape: Tape, rounding: bool = True) -> tuple[int, int, str]:
    """Peak of live bytes (each block rounded to 512), the index of the event that reaches it, and
    the moment's name."""
    live = best = at = 0
    sizes: dict[int, int] = {}
    moment = named = ""
    for index, event in enumerate(tape.events):
        if isinstance(event, Alloc):
            size = rounded(event.size) if rounding else event.size
            sizes[event.id] = size
            live += size
            if live > best:
                best, at, named = live, index, moment
        elif isinstance(event, Free):
            live -= sizes[event.id]
        elif isinstance(event, Mark):
            moment = f"{event.phase} {event.step} {event.where}".strip()
    return best, at, named


def alive(tape: Tape, at: int) -> list[Alloc]:
    live: dict[int, Alloc] = {}
    for event in tape.events[: at + 1]:
        if isinstance(event, Alloc):
            live[event.id] = event
        elif isinstance(event, Free):
            del live[event.id]
    return list(live.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--keep-outputs", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--events", action="store_true", help="print every event instead")
    known, rest = parser.parse_known_args()
    values = {
        rest[index].removeprefix("--").replace("-", "_"): rest[index + 1]
        for index in range(0, len(rest) - 1, 2)
    }
    job = job_from(values)
    from memfit.trace import trace_config

    start = time.perf_counter()
    tape = trace_config(
        json.loads(Path(known.config).read_text()),
        job,
        layers=known.layers,
        keep_outputs=known.keep_outputs,
        steps=known.steps,
    )
    taken = time.perf_counter() - start
    if known.events:
        for event in tape.events:
            say(event)
        return
    best, at, moment = peak(tape)
    say(
        f"peak allocated {best} B = {best / 2**30:.4f} GiB at event {at} of {len(tape)} "
        f"({moment}); traced in {taken:.1f} s, imports included"
    )
    blocks = alive(tape, at)
    parts: Counter[str] = Counter()
    for one in blocks:
        parts[one.part] += rounded(one.size)
    say("  ".join(f"{part} {size}" for part, size in parts.most_common()))
    groups: Counter[tuple[str, ...]] = Counter()
    count: Counter[tuple[str, ...]] = Counter()
    for one in blocks:
        where = ".".join("*" if piece.isdigit() else piece for piece in one.where.split("."))
        key: tuple[str, ...] = (str(one.part), where, one.op, str(one.formula))
        groups[key] += rounded(one.size)
        count[key] += 1
    for key, size in groups.most_common(known.rows):
        say(f"{size:>16} {count[key]:>5} × {key[0]:<12} {key[1]:<44} {key[2]:<40} {key[3]}")


if __name__ == "__main__":
    main()
