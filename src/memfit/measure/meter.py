"""The meter of real steps: it reads counters where the trace recorder writes events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from memfit.measure import history
from memfit.measure.history import Began
from memfit.measure.record import Peak
from memfit.tape import Tape

MARK = "memfit mark "


class Meter:
    """`mark` closes a phase and opens the next one. What only a trace needs (owners of blocks) is
    nothing here."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: list[Peak] = []
        self.begun: list[Began] = []
        self.step = 0
        self.phase, self.since = "", time.perf_counter()
        self.names: dict[int, str] = {}
        self.optimizer: object = None
        self.serving, self.calls = False, 0

    def mark(self, phase: str, step: int | None = None) -> None:
        self.close()
        self.phase, self.step = phase, self.step if step is None else step
        self.since = time.perf_counter()
        self.begun.append(Began(phase, self.step, time.time_ns()))  # type: ignore[arg-type]

    def close(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Nothing more is watched."""

    def tape(self) -> Tape:
        """Every event since the start, where they were kept."""
        raise NotImplementedError

    def rest(self) -> None:
        """Backward has ended."""

    def owned(self, tensor: torch.Tensor) -> None:
        """Nobody asks here whose a block is."""


class CudaMeter(Meter):
    """Counters of the caching allocator, and NVML's figure of the whole device. `cuda` is
    `torch.cuda`, or what acts as it."""

    def __init__(
        self,
        device: torch.device,
        cuda: Any = torch.cuda,
        used: Callable[[], int | None] | None = None,
    ) -> None:
        super().__init__(device)
        self.cuda = cuda
        self.used = used or driver(device)
        self.device_peak = self.requested = 0

    def close(self) -> None:
        self.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self.phase:
            held, cached = (
                self.cuda.max_memory_allocated(self.device),
                self.cuda.max_memory_reserved(self.device),
            )
            self.peaks.append(
                Peak(
                    phase=self.phase,
                    step=self.step,
                    allocated=held,
                    reserved=cached,
                    seconds=now - self.since,
                )
            )
            self.requested = max(
                self.requested,
                self.cuda.memory_stats(self.device).get("requested_bytes.all.peak", 0),
            )
            self.device_peak = max(self.device_peak, self.used() or 0)
        self.cuda.reset_peak_memory_stats(self.device)

    def figures(self) -> dict[str, Any]:
        stats = self.cuda.memory_stats(self.device)
        return {
            "allocated": max((one.allocated for one in self.peaks), default=None),
            "reserved": max((one.reserved or 0 for one in self.peaks), default=None),
            "requested": self.requested or None,
            "retries": stats.get("num_alloc_retries"),
            "total": self.cuda.get_device_properties(self.device).total_memory,
        }

    def tape(self) -> Tape:
        return history.of_snapshot(
            self.cuda.memory._snapshot(self.device)["device_traces"][self.device.index or 0],
            self.begun,
        )


def driver(device: torch.device) -> Callable[[], int | None]:
    """Bytes in use on the device as nvidia-smi shows them; without NVML the driver's own figure,
    which needs a context.

    NVML counts all GPUs of the machine, torch those that CUDA_VISIBLE_DEVICES leaves: torch knows
    which is meant (torch/cuda/__init__.py _get_nvml_device_index, from 2.1 on)."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(device))
        pynvml.nvmlDeviceGetMemoryInfo(handle)
        return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)

    def asked() -> int | None:
        if not torch.cuda.is_initialized():
            return None
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)

    return asked


class ProfilerMeter(Meter):
    """On a CPU: torch's profiler sees every block come and go. Phases are told apart by marks among
    its events."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        self.profiler.__enter__()
        self.phases: list[tuple[str, int, float]] = []

    def close(self) -> None:
        if self.phase:
            self.phases.append((self.phase, self.step, time.perf_counter() - self.since))
        with torch.profiler.record_function(f"{MARK}{len(self.phases)}"):
            pass

    def stop(self) -> None:
        self.profiler.__exit__(None, None, None)

    def tape(self) -> Tape:
        found = self.profiler.profiler
        assert found is not None
        return history.of_profiler(found.kineto_results, self.begun)

    def figures(self) -> dict[str, Any]:
        """Live bytes, summed up from the first event on; what was there before torch's profiler is
        not."""
        self.stop()
        found = self.profiler.profiler
        assert found is not None
        assert found.kineto_results is not None
        events = sorted(found.kineto_results.events(), key=lambda one: one.start_ns())
        live = top = peak = 0
        tops: list[int] = []
        for event in events:
            if event.name().startswith(MARK):
                tops.append(top)
                top = live
            elif event.name() == "[memory]":
                live += event.nbytes()
                top, peak = max(top, live), max(peak, live)
        for (phase, step, seconds), highest in zip(self.phases, tops[1:], strict=False):
            self.peaks.append(
                Peak(phase=phase, step=step, allocated=highest, reserved=None, seconds=seconds)
            )
        return {"allocated": peak}


def meter_of(device: torch.device) -> CudaMeter | ProfilerMeter:
    return CudaMeter(device) if device.type == "cuda" else ProfilerMeter(device)
