"""The GPU of this machine, read from the driver through NVML (nvidia-ml-py): total, reserved and
free memory."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

from memfit.constants import assumed
from memfit.errors import InputError, MissingExtra
from memfit.hardware.gpu import GPU, variants
from memfit.hardware.outside import reserve
from memfit.lazy_dataclass import dataclass
from memfit.units import MIB

_OTHERWISE = "name a GPU (`--gpu rtx-4090`) or give its memory (`--memory 24GiB`)"
_SAME_CARD: Annotated[
    float,
    assumed(
        "share by which two totals of the same card differ at most",
        "ECC takes 1/16 of GDDR6; cards of one name and another size (RTX 3080) lie further apart",
    ),
] = 0.07
_SAME_TOTAL: Annotated[
    float, assumed("share by which two readings of one total differ at most", "rounding to MiB")
] = 1 / 200


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    uuid: str
    index: int
    gpu: GPU


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _load() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        raise MissingExtra("asking the driver for its GPUs (`--gpu auto`)", "measure") from None


@contextmanager
def _opened(nvml: Any) -> Iterator[None]:
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        raise InputError.one(
            f"this machine has no working NVIDIA driver ({str(error)[:80]})",
            where="gpu",
            hint=_OTHERWISE,
        ) from None
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _memory(nvml: Any, handle: Any) -> tuple[int, int | None, int] | None:
    """(total, reserved or None, free), or None where the driver does not say (unified memory)."""
    try:
        # Version 2 tells apart what the driver reserves: total less reserved is the total that CUDA
        # shows (ggml-org/llama.cpp#23604).
        told = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return int(told.total), int(told.reserved), int(told.free)
    except nvml.NVMLError:
        pass
    try:
        told = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(told.total), None, int(told.free)
    except nvml.NVMLError:
        return None


def _row(name: str, total: int) -> GPU | None:
    """The row of that name and about that size."""
    close = [
        (abs(total - (gpu.smi or gpu.memory)) / (gpu.smi or gpu.memory), gpu)
        for gpu in variants(name)
    ]
    best = min(close, key=lambda pair: pair[0], default=None)
    return best[1] if best and best[0] <= _SAME_CARD else None


def _read(nvml: Any, handle: Any, parent: Any, driver: str) -> GPU:
    """One device; a MIG slice has its `parent`'s compute capability and nobody's rates."""
    name = _text(nvml.nvmlDeviceGetName(handle))
    told = _memory(nvml, handle)
    if told is None:
        known = variants(name)
        if len(known) != 1:
            raise InputError.one(
                f"the driver does not report the memory of `{name[:80]}`",
                where="gpu",
                hint=_OTHERWISE,
            )
        return known[0]
    total, reserved, free = told
    row = _row(name, total) or GPU(
        id="auto", name=name, vendor="nvidia", memory=total, memory_range=(total, total)
    )
    if reserved is not None:
        memory, how, status = (
            total - reserved,
            f"minus {reserved / MIB:.0f} MiB that the driver reserves",
            "log",
        )
    elif row.smi and abs(total - row.smi) < total * _SAME_TOTAL:
        memory, how, status = (
            min(total, row.memory),
            f"for {row.id}: {row.cites['memory']}",
            row.status["memory"],
        )
    else:
        memory, how, status = (
            total - reserve(total).high,
            f"minus what the driver may reserve: {reserve(total).cite}",
            "derived",
        )
    sm = row.sm or tuple(nvml.nvmlDeviceGetCudaComputeCapability(parent))
    return replace(
        row,
        name=name,
        memory=memory,
        memory_range=(memory, memory),
        smi=total,
        free=free,
        held=max(0, memory - free),
        sm=sm,
        arch=row.arch or f"sm_{sm[0]}{sm[1]}",
        status={**row.status, "memory": status},
        cites={**row.cites, "memory": f"NVML, driver {driver}: {total / MIB:.0f} MiB, {how}"},
    )


def _slices(nvml: Any, handle: Any) -> list[Any] | None:
    """Handles of the MIG slices, or None when the device is whole."""
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return None
    except nvml.NVMLError:
        return None  # cannot be sliced
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except nvml.NVMLError:
            continue  # an empty place
    return found


def _slice(nvml: Any, handle: Any, parent: Any, driver: str) -> GPU:
    gpu = _read(nvml, handle, parent, driver)
    try:
        sms: int | None = int(nvml.nvmlDeviceGetAttributes(handle).multiprocessorCount)
    except nvml.NVMLError:
        sms = None
    return replace(gpu, sms=sms, note="MIG slice: bandwidth and compute rates are unknown")


def _devices(nvml: Any) -> list[_Seen]:
    driver = _text(nvml.nvmlSystemGetDriverVersion())
    seen: list[_Seen] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        slices = _slices(nvml, handle)
        found = [(part, _slice(nvml, part, handle, driver)) for part in slices or ()]
        if slices is None:
            found = [(handle, _read(nvml, handle, handle, driver))]
        seen += [
            _Seen(uuid=_text(nvml.nvmlDeviceGetUUID(one)), index=index, gpu=gpu)
            for one, gpu in found
        ]
    return seen


def _visible(seen: list[_Seen], wanted: str | None) -> list[_Seen]:
    """As CUDA reads `CUDA_VISIBLE_DEVICES`: numbers or UUID prefixes, up to the first that names
    nothing."""
    if wanted is None:
        return seen
    chosen: list[_Seen] = []
    for word in (part.strip() for part in wanted.split(",")):
        found = [
            one
            for one in seen
            if (
                str(one.index) == word
                if word.isdigit()
                else bool(word) and one.uuid.startswith(word)
            )
        ]
        if not found:
            break
        chosen += found
    return chosen


def auto_gpus(nvml: Any = None, *, environ: Mapping[str, str] | None = None) -> tuple[GPU, ...]:
    """All GPUs that a process on this machine sees, in the driver's order; each MIG slice counts as
    a GPU.

    `nvml` is the `pynvml` module or anything that answers like it.
    """
    nvml = nvml or _load()
    wanted = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    with _opened(nvml):
        try:
            seen = _devices(nvml)
        except nvml.NVMLError as error:
            raise InputError.one(
                f"the NVIDIA driver failed ({str(error)[:80]})",
                where="gpu",
                hint=_OTHERWISE,
            ) from None
    if not seen:
        raise InputError.one(
            "the NVIDIA driver reports no GPU on this machine", where="gpu", hint=_OTHERWISE
        )
    chosen = _visible(seen, wanted)
    if not chosen:
        raise InputError.one(
            (
                f"`CUDA_VISIBLE_DEVICES={str(wanted)[:40]}` hides all {len(seen)} GPUs of "
                "this machine"
            ),
            where="gpu",
            hint="unset it",
        )
    return tuple(one.gpu for one in chosen)


def auto_gpu(nvml: Any = None, *, index: int = 0, environ: Mapping[str, str] | None = None) -> GPU:
    """The GPU that a job on this machine would get: the first visible one, unless `index` says
    another."""
    gpus = auto_gpus(nvml, environ=environ)
    if not 0 <= index < len(gpus):
        raise InputError.one(
            f"no GPU has index {index}", where="gpu", hint=f"from 0 to {len(gpus) - 1}"
        )
    return gpus[index]
