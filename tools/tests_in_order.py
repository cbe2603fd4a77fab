"""Runs pytest for tools/mutants.py: the tests that reach a changed place first, and within MEMORY
bytes of address space, so that a change cannot eat the machine.

python tools/tests_in_order.py PLAN [pytest's arguments]

PLAN is a JSON file. `{"record": PATH}` notes for every test how long it takes and which marks of
the sources it reaches (a mark is a call of `__reached__`), and runs the tests from the last to the
first: one that needs another one before it fails here. `{"order": [[node id, seconds]]}` is what
runs first; a test that takes so much of the processor never ends, and has failed.
"""

from __future__ import annotations

import builtins
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

MEMORY = 6 << 30  # address space of a test run; the tests of all rooms need 2 GiB at most


class Recorder:
    """Notes what each test reaches and how long it takes."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.tests: dict[str, tuple[float, list[int]]] = {}
        self.reached: set[int] = set()
        vars(builtins)["__reached__"] = self.reached.add

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.reverse()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.reached.clear()
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            self.tests[item.nodeid] = (time.perf_counter() - begin, sorted(self.reached))

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.tests), encoding="utf-8")


def give_up(_signal: int, _frame: object) -> None:
    os._exit(pytest.ExitCode.TESTS_FAILED)


class Order:
    """Runs the named tests first, in that order, each within its limit; the others after them."""

    def __init__(self, limits: list[tuple[str, float]]) -> None:
        self.place = {name: number for number, (name, _) in enumerate(limits)}
        self.limits = dict(limits)
        signal.signal(signal.SIGPROF, give_up)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.place.get(item.nodeid, len(self.place)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        signal.setitimer(signal.ITIMER_PROF, self.limits.get(item.nodeid, 0))
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def main(plan: str, *words: str) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    given = json.loads(Path(plan).read_text(encoding="utf-8"))
    plugin = Recorder(given["record"]) if "record" in given else Order(given.get("order", []))
    return pytest.main([*words], plugins=[plugin])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
