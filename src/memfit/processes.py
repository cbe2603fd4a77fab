"""Independent questions, shared among processes of this machine. `MEMFIT_PROCESSES` sets how many
the command line starts; 1 starts none."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

T = TypeVar("T")
R = TypeVar("R")
VARIABLE = "MEMFIT_PROCESSES"


def usual_processes() -> int:
    """As many as `MEMFIT_PROCESSES` says, else one for each core that this process may use."""
    said = os.environ.get(VARIABLE, "").strip()
    if said.isdecimal() and int(said) > 0:
        return int(said)
    if sys.platform in ("emscripten", "wasi"):
        return 1
    known = getattr(os, "sched_getaffinity", None)
    return len(known(0)) if known else os.cpu_count() or 1


def answers(
    ask: Callable[[T], R], items: Sequence[T], processes: int = 1
) -> Generator[tuple[int, R]]:
    """The place of each item and its answer, in the order in which they come. Close the iterator to
    end the processes. What a process cannot answer is asked here, where its error is raised."""
    count = min(processes, len(items))
    if count < 2:
        yield from ((place, ask(item)) for place, item in enumerate(items))
        return
    from multiprocessing.connection import wait

    workers: list[BaseProcess] = []
    places = iter(range(len(items)))
    try:
        free: list[Connection] = list(started(ask, items, count, workers))
        busy: dict[Any, int] = {}
        while True:
            for pipe, place in zip(free, places, strict=False):
                busy[pipe] = place
                with contextlib.suppress(OSError):  # of a lost process, which is seen below
                    pipe.send(place)
            if not busy:
                break
            free = []
            ready: list[Any] = wait(list(busy))
            for pipe in ready:
                place = busy.pop(pipe)
                try:
                    found = pipe.recv()
                except (EOFError, OSError):
                    found = ask(items[place])
                else:
                    free.append(pipe)
                yield place, found
        yield from ((place, ask(items[place])) for place in places)  # no process is left
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def started(
    ask: Callable[[T], Any], items: Sequence[T], count: int, workers: list[BaseProcess]
) -> Iterator[Connection]:
    """Connections to new processes, which are added to `workers`; fewer where the system has no
    room for more. A copy of this process starts at once, and is safe on Linux without threads."""
    import multiprocessing

    copied = False
    with contextlib.suppress(OSError):
        copied = sys.platform == "linux" and len([*Path("/proc/self/task").iterdir()]) == 1
    context: Any = multiprocessing.get_context("fork" if copied else "spawn")
    for _ in range(count):
        try:
            ours, theirs = context.Pipe()
            worker = context.Process(target=serve, args=(theirs, ask, items), daemon=True)
            worker.start()
        except OSError:
            return
        workers.append(worker)
        theirs.close()
        yield ours


def serve(pipe: Connection, ask: Callable[[T], Any], items: Sequence[T]) -> None:
    """Answer items by their places until the process that asks has gone. It is interrupted by
    Ctrl-C, and ends this one."""
    from multiprocessing import parent_process
    from multiprocessing.connection import wait

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    parent = parent_process()
    assert parent is not None
    try:
        while pipe in wait([pipe, parent.sentinel]):
            pipe.send(ask(items[pipe.recv()]))
    except Exception:  # noqa: BLE001  # the one who asks meets it again
        pipe.close()


__all__ = ["VARIABLE", "answers", "usual_processes"]
