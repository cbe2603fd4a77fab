"""Reading tapes in tests: what is alive when, and what a span allocates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.tape import Alloc, Free, Mark, Tape, check

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def tape_of(config: dict[str, Any] | None = None, compact: bool = False, **job: Any) -> Tape:
    """The formulas' tape, legal by `check`."""
    tape = lower(
        build(LLAMA if config is None else config),
        Job(**{"batch": 2, "seq": 128, **job}),
        compact=compact,
    )
    check(tape)
    return tape


def walked(tape: Tape) -> Iterator[tuple[Mark, Any, dict[int, Alloc]]]:
    """Each event with the mark it stands under and the blocks alive before it."""
    mark, live = Mark("load"), dict[int, Alloc]()
    for event in tape.events:
        yield mark, event, live
        if isinstance(event, Mark):
            mark = event
        elif isinstance(event, Alloc):
            live[event.id] = event
        elif isinstance(event, Free):
            del live[event.id]


def alive(tape: Tape, phase: str, step: int = 0) -> list[Alloc]:
    """The blocks alive when the phase of that step begins."""
    for _, event, live in walked(tape):
        if isinstance(event, Mark) and (event.phase, event.step) == (phase, step):
            return list(live.values())
    raise AssertionError(f"no {phase} of step {step}")


def made(tape: Tape, phase: str, where: str = "", step: int = 0) -> list[Alloc]:
    """What is allocated in a phase, in modules whose path ends so."""
    return [
        event
        for mark, event, _ in walked(tape)
        if isinstance(event, Alloc)
        and (mark.phase, mark.step) == (phase, step)
        and event.where.endswith(where)
    ]


def sizes(blocks: list[Alloc], op: str = "") -> Counter[int]:
    return Counter(block.size for block in blocks if op in ("", block.op))


def peak(tape: Tape) -> int:
    """The highest sum of live blocks, each rounded up to 512 bytes."""
    live: dict[int, int] = {}
    total = best = 0
    for event in tape.events:
        if isinstance(event, Alloc):
            live[event.id] = -(-event.size // 512) * 512
            total += live[event.id]
            best = max(best, total)
        elif isinstance(event, Free):
            total -= live.pop(event.id)
    return best
