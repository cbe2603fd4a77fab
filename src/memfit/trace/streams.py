"""Streams and events of the pretended GPU: nothing runs on them, but the recorder knows which one
is current and who waits for whom."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from memfit.tape import Sync
from memfit.trace import cuda
from memfit.trace.recorder import Recorder


class Streams:
    """All streams of one recorded program; number 0 is the default one."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.count = recorder, 0
        streams = self

        class Stream:
            def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
                streams.count += 1
                self.device, self.priority, self.stream_id = (
                    cuda.own(),
                    priority,
                    streams.count,
                )

            @property
            def cuda_stream(self) -> int:
                return self.stream_id

            def synchronize(self) -> None: ...

            def wait_stream(self, other: Stream) -> None:
                streams.wait(self.stream_id, other.stream_id)

            def wait_event(self, event: Event) -> None:
                streams.wait(self.stream_id, event.stream)

            def query(self) -> bool:
                return True

            def is_capturing(self) -> bool:
                return False

            def record_event(self, event: Event | None = None) -> Event:
                return (Event() if event is None else event).record(self)

            def __enter__(self) -> Stream:
                self.before, recorder.stream = recorder.stream, self.stream_id
                return self

            def __exit__(self, *_: Any) -> None:
                recorder.stream = self.before

        class Event:
            def __init__(self, *_: Any, **__: Any) -> None:
                self.record()

            def record(self, stream: Stream | None = None) -> Event:
                self.at = time.perf_counter()
                self.stream, self.lent = (
                    recorder.stream if stream is None else stream.stream_id,
                    dict(recorder.lent),
                )
                return self

            def wait(self, stream: Stream | None = None) -> None:
                streams.wait(recorder.stream if stream is None else stream.stream_id, self.stream)

            def synchronize(self) -> None:
                """The program itself waits. What other streams were given before the event is taken
                to be over, too: they keep pace."""
                for stream, lent in recorder.lent.items():
                    recorder.events.append(
                        Sync(recorder.stream, stream, lent - self.lent.get(stream, 0))
                    )

            def query(self) -> bool:
                return True

            def elapsed_time(self, end: Event) -> float:
                """Milliseconds of this machine."""
                return (end.at - self.at) * 1000

        self.kind, self.event = Stream, Event
        self.default = Stream()
        self.default.stream_id, self.count = 0, 0
        self.known: dict[int, Any] = {0: self.default}

    def wait(self, stream: int, other: int) -> None:
        if stream != other:
            self.recorder.events.append(Sync(stream, other))

    def current(self, *_: Any, **__: Any) -> Any:
        if self.recorder.stream:
            found = self.kind()
            found.stream_id, self.count = self.recorder.stream, self.count - 1
            return found
        return self.default

    @contextlib.contextmanager
    def on(self, stream: Any = None, **_: Any) -> Iterator[None]:
        """`torch.cuda.stream(s)`."""
        before = self.recorder.stream
        self.recorder.stream = before if stream is None else stream.stream_id
        try:
            yield
        finally:
            self.recorder.stream = before

    def answers(self) -> list[tuple[Any, str, Any]]:
        def used(tensor: torch.Tensor, stream: Any) -> None:
            block = self.recorder.owned(tensor)
            if block is not None and stream.stream_id != block.stream:
                block.users.add(stream.stream_id)

        found: list[tuple[Any, str, Any]] = [
            (torch.cuda, "Stream", self.kind),
            (torch.cuda, "Event", self.event),
            (torch.cuda, "stream", self.on),
            (torch.cuda, "current_stream", self.current),
            (torch.cuda, "default_stream", lambda *_, **__: self.default),
            (torch.Tensor, "record_stream", used),
            (torch, "Stream", self.kind),
            (torch, "Event", self.event),
        ]
        if hasattr(torch, "accelerator"):
            found += [(torch.accelerator, "current_stream", self.current)]
        return found


@contextlib.contextmanager
def followed(recorder: Recorder) -> Iterator[Streams]:
    streams = Streams(recorder)
    with cuda.patched(streams.answers()):
        yield streams


__all__ = ["Streams", "followed"]
