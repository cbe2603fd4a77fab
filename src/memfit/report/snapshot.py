"""A tape as torch's own memory snapshot (`torch.cuda.memory._dump_snapshot`), for PyTorch's memory
visualizer.

Addresses and segments are those of the simulated allocator. Where a real snapshot has the Python
stack of an allocation there is the operation, the module and the phase. Format:
torch/cuda/memory.py `_snapshot`, torch 2.13.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.estimate import Estimate
from memfit.simulate.allocator import Allocator, Segment
from memfit.simulate.settings import Settings
from memfit.tape import Alloc, Free, Mark, Tape

BASE = 0x7F00_0000_0000  # where CUDA's addresses begin to look like those of CUDA
POOL = (0, 0)
Frames = list[dict[str, Any]]


def write(estimate: Estimate, path: Path) -> None:
    """Write the snapshot of the run on a GPU with unlimited memory."""
    found = snapshot(
        estimate.memory.tape, Settings.parse(estimate.job.alloc_conf, where="job.alloc_conf")
    )
    try:
        with path.open("wb") as file:
            pickle.dump(
                found, file, protocol=4
            )  # what the visualizer reads, whatever Python writes by default
    except OSError as error:
        raise InputError.one(
            f"`{path}` cannot be written: {(error.strerror or 'unknown failure').lower()}",
            where="snapshot",
        ) from None


def snapshot(tape: Tape, settings: Settings) -> dict[str, Any]:
    """Segments as they are at the end, and every event that led there."""
    run = Run(Allocator(settings, total=None if settings.memory_fraction >= 1 else 1 << 62))
    entries = list(run.entries(tape))
    return {
        "segments": [run.segment(one) for one in run.allocator.segments()],
        "device_traces": [entries],
        "allocator_settings": {"expandable_segments": settings.expandable_segments},
        "external_annotations": [],
    }


class Run:
    """A replay of a tape through the allocator, in the form of PyTorch's memory snapshots."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.live: dict[
            int, tuple[int, int, int, Frames]
        ] = {}  # block -> address, size asked for, stream, frames
        self.held: dict[int, Segment] = {}
        self.clock = 0

    def entries(self, tape: Tape) -> Iterator[dict[str, Any]]:
        phase, step = "", 0
        for event in tape:
            if isinstance(event, Mark):
                phase, step = event.phase, event.step
            elif isinstance(event, Alloc):
                yield from self.alloc(event, frames(event, phase, step))
            elif isinstance(event, Free) and event.id in self.live:
                address, size, stream, where = self.live.pop(event.id)
                for other in event.streams:
                    self.allocator.record_stream(event.id, other)
                self.allocator.free(event.id)
                for action in ("free_requested", "free_completed"):
                    yield self.entry(action, address, size, stream, where)

    def alloc(self, event: Alloc, where: Frames) -> Iterator[dict[str, Any]]:
        before = self.allocator.reserved
        self.allocator.malloc(event.id, event.size, event.stream)
        if self.allocator.reserved != before:
            yield from self.changed(where)
        place = self.allocator.place(event.id)
        if place is not None:
            self.live[event.id] = (BASE + place[0], event.size, event.stream, where)
            yield {
                **self.entry("alloc", BASE + place[0], event.size, event.stream, where),
                "category": event.part,
            }

    def changed(self, where: Frames) -> Iterator[dict[str, Any]]:
        """Segments that are new, or gone."""
        now = {one.address: one for one in self.allocator.segments()}
        for address, one in self.held.items():
            if address not in now or now[address].size != one.size:
                yield self.entry("segment_free", BASE + address, one.size, one.stream, where)
        for address, one in now.items():
            if address not in self.held or self.held[address].size != one.size:
                yield self.entry("segment_alloc", BASE + address, one.size, one.stream, where)
        self.held = now

    def entry(
        self, action: str, address: int, size: int, stream: int, where: Frames
    ) -> dict[str, Any]:
        self.clock += 1
        return {
            "action": action,
            "addr": address,
            "size": size,
            "stream": stream,
            "frames": where,
            "pool_id": POOL,
            "time_us": self.clock,
        }

    def segment(self, one: Segment) -> dict[str, Any]:
        asked = {address: (size, where) for address, size, _, where in self.live.values()}
        blocks: list[dict[str, Any]] = []
        at = BASE + one.address
        for size, used in one.blocks:
            wanted, where = asked.get(at, (size, [])) if used else (0, [])
            state = "active_allocated" if used else "inactive"
            blocks.append(
                {
                    "address": at,
                    "size": size,
                    "requested_size": wanted,
                    "state": state,
                    "frames": where,
                }
            )
            at += size
        return {
            "device": 0,
            "address": BASE + one.address,
            "total_size": one.size,
            "stream": one.stream,
            "segment_pool_id": POOL,
            "segment_type": "small" if one.small else "large",
            "allocated_size": one.allocated,
            "active_size": one.allocated,
            "requested_size": sum(block["requested_size"] for block in blocks),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }


def frames(event: Alloc, phase: str, step: int) -> Frames:
    """Innermost first, as in a stack."""
    shape = event.formula if isinstance(event.formula, str) else " x ".join(map(str, event.formula))
    return [
        {"filename": event.where or "-", "line": 0, "name": f"{event.op} {shape}".strip()},
        {"filename": phase or "-", "line": step, "name": event.part},
    ]


__all__ = ["snapshot", "write"]
