"""The allocator of a running program: what `torch.cuda.memory_allocated` and similar functions
return at this moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memfit.simulate.allocator import Allocator
from memfit.simulate.settings import Settings
from memfit.tape import Free
from memfit.trace.recorder import Block, Recorder


class Live:
    """Follows a recorder's events, only as far as somebody asks."""

    def __init__(self, recorder: Recorder, settings: Settings, total: int) -> None:
        self.recorder, self.total = recorder, total
        self.allocator = Allocator(settings, None, total=total)
        self.done = 0
        self.highest = {"allocated": 0, "reserved": 0}  # before the last reset
        self.counts = {"allocation": 0, "free": 0}

    def caught_up(self) -> Allocator:
        events, allocator = self.recorder.events, self.allocator
        for event in events[self.done :]:
            if isinstance(event, Block):
                allocator.malloc(event.id, event.size)
                self.counts["allocation"] += 1
            elif isinstance(event, Free):
                allocator.free(event.id)
                self.counts["free"] += 1
        self.done = len(events)
        return allocator

    def allocated(self, *_: Any) -> int:
        return self.caught_up().allocated

    def reserved(self, *_: Any) -> int:
        return self.caught_up().reserved

    def peak_allocated(self, *_: Any) -> int:
        return self.caught_up().peak_allocated

    def peak_reserved(self, *_: Any) -> int:
        return self.caught_up().peak_reserved

    def reset_peaks(self, *_: Any) -> None:
        self.caught_up().reset_peaks()

    def empty_cache(self) -> None:
        self.caught_up().empty_cache()

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        """(free, total), as if no other program used the GPU; the context is not counted."""
        return max(0, self.total - self.reserved()), self.total

    def stats(self, *_: Any) -> dict[str, int]:
        """The figures of `memory_stats` that programs read."""
        held = self.caught_up()
        segments = held.segments()
        figures = {
            "allocated_bytes": (held.allocated, held.peak_allocated),
            "reserved_bytes": (held.reserved, held.peak_reserved),
            "active_bytes": (held.active, held.peak_active),
            "requested_bytes": (held.requested, held.peak_requested),
            "segment": (len(segments), len(segments)),
            "allocation": (self.counts["allocation"] - self.counts["free"],) * 2,
        }
        found = {
            f"{name}.all.{which}": value
            for name, pair in figures.items()
            for which, value in zip(("current", "peak"), pair, strict=True)
        }
        return dict(sorted({**found, "num_alloc_retries": held.retries, "num_ooms": 0}.items()))

    def summary(self, *_: Any, **__: Any) -> str:
        return "\n".join(f"{name:<32}{value:>20}" for name, value in self.stats().items())

    def answers(self) -> dict[str, Callable[..., Any]]:
        """By the names that `torch.cuda` and `torch.cuda.memory` have for them."""
        return {
            "memory_allocated": self.allocated,
            "max_memory_allocated": self.peak_allocated,
            "memory_reserved": self.reserved,
            "max_memory_reserved": self.peak_reserved,
            "memory_cached": self.reserved,
            "max_memory_cached": self.peak_reserved,
            "reset_peak_memory_stats": self.reset_peaks,
            "reset_max_memory_allocated": self.reset_peaks,
            "reset_max_memory_cached": self.reset_peaks,
            "reset_accumulated_memory_stats": lambda *_: None,
            "memory_stats": self.stats,
            "memory_summary": self.summary,
            "mem_get_info": self.mem_get_info,
            "empty_cache": self.empty_cache,
        }


__all__ = ["Live"]
