"""Signs of life on stderr while the work goes on."""

from __future__ import annotations

import os
import sys
import time

from memfit.terminal import escaped, put

SURE, BAR = 0.05, 20  # share done from which the time left is told; characters of a bar
OFTEN, SELDOM = 0.1, 10.0  # seconds between two signs of life: on a terminal, elsewhere


class Life:
    """Tells on stderr how far the work is: in one line on a terminal, now and then elsewhere."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        stream = sys.stderr  # None where it is closed
        self.terminal = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
        self.last, self.shown, self.share, self.begun = self.start, 0, 0.0, self.start

    def __call__(self, phase: str, step: int, layer: str, events: int) -> None:
        where = f", {layer}" if layer else ""
        self.say(f"tracing: {phase}, step {step}{where}, {events} events")

    def progress(self, share: float, what: str) -> None:
        """A progress bar with the time left, estimated from the share that is done."""
        if share < self.share / 2:  # another search begins
            self.begun, self.share = time.monotonic(), 0.0
        share = self.share = min(1.0, max(share, self.share))
        passed = time.monotonic() - self.begun
        left = f", about {passed * (1 / share - 1):.0f} s left" if share >= SURE else ""
        full = round(BAR * share)
        self.show(f"[{'█' * full}{'░' * (BAR - full)}] {share:4.0%} {what}{left}")

    def say(self, what: str) -> None:
        self.show(f"{what}, {time.monotonic() - self.start:.0f} s")

    def show(self, what: str) -> None:
        now = time.monotonic()
        if now - self.last < (OFTEN if self.terminal else SELDOM):
            return
        self.last = now
        text = escaped(what, keep="")[:78]
        if self.terminal:
            put("\r" + text.ljust(self.shown))
            self.shown = len(text)
        else:
            put(text + "\n")

    def done(self) -> None:
        if self.shown:
            put("\r" + " " * self.shown + "\r")


__all__ = ["Life"]
