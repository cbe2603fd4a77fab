"""Tests are sorted by what they need: the folder sets the marker, and what the machine lacks is
skipped by name."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent

# One thread for torch here and in every process that tests start: two workers share the cores, and
# threads that wait spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MEMFIT_CACHE"] = "off"  # no test takes the answer of an earlier run
os.environ["MEMFIT_PROCESSES"] = "1"  # pytest's own workers share the cores

# No deadline: on a shared machine a slow example says nothing about the code. CI draws the same
# examples every time.
settings.register_profile(
    "memfit",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("memfit")


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


# torch and transformers are millions of objects, and each full collection looks through all of
# them: an eighth of the time of a test with torch.
gc.set_threshold(5000, 10, 40)
begun: Counter[Path] = Counter()  # tests of a file that have been started


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is there stays. The first test of a file imports what the file needs."""
    begun[item.path] += 1
    if begun[item.path] <= 2 or item.get_closest_marker("slow"):
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(
        config, "workerinput"
    ):  # files with long ones first, so that no worker waits for another one at the end
        long = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in long)
    folders = {
        item: item.path.relative_to(HERE).parts[0]
        for item in items
        if item.path.is_relative_to(HERE)
    }
    has_torch = importlib.util.find_spec("torch") is not None
    has_gpu = "gpu" in folders.values() and _has_gpu()
    for item, folder in folders.items():
        if folder in ("torch", "gpu"):
            item.add_marker(folder)
        if folder == "torch" and not has_torch:
            item.add_marker(pytest.mark.skip(reason="needs the extra `trace`"))
        if folder == "gpu" and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
