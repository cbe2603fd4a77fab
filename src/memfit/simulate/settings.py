"""What users may set of the CUDA caching allocator, and the reader of the text of
`PYTORCH_ALLOC_CONF` (or `PYTORCH_CUDA_ALLOC_CONF`, its older name) as torch 2.13 understands it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from memfit.constants import counted, setting
from memfit.errors import InputError, Problem, raise_errors
from memfit.lazy_dataclass import dataclass
from memfit.registry import nearest
from memfit.units import MIB

_CONFIG = "torch 2.13 c10/core/AllocatorConfig.h; up to 2.8 in c10/cuda/CUDACachingAllocator.cpp"
ROUNDING: Annotated[
    int, counted("bytes of which every block is a multiple: kMinBlockSize", _CONFIG)
] = 512
SMALL_REQUEST: Annotated[
    int, counted("bytes up to which a request lives in the small pool: kSmallSize", _CONFIG)
] = 1 * MIB
SMALL_SEGMENT: Annotated[
    int, counted("bytes of a segment of the small pool: kSmallBuffer", _CONFIG)
] = 2 * MIB
LARGE_SEGMENT: Annotated[
    int, counted("bytes of a shared segment of the large pool: large_segment_size_mb", _CONFIG)
] = 20 * MIB
LARGE_REQUEST: Annotated[
    int, counted("bytes from which a request gets its own segment: kMinLargeAlloc", _CONFIG)
] = 10 * MIB
SEGMENT_ROUNDING: Annotated[
    int, counted("bytes of which such a segment is a multiple: kRoundLarge", _CONFIG)
] = 2 * MIB
INTERVALS: Annotated[
    int,
    counted(
        "powers of two that roundup_power2_divisions knows, from 1 MiB, clamped at both ends",
        "torch 2.13 c10/core/AllocatorConfig.cpp",
    ),
] = 16
LARGEST: Annotated[
    int,
    counted(
        "bytes that no request reaches",
        "torch 2.13 c10/cuda/CUDACachingAllocator.cpp NativeCachingAllocator::allocate",
    ),
] = 2**60

_FIELDS = {
    "expandable_segments": "expandable_segments",
    "max_split_size_mb": "max_split_size",
    "max_non_split_rounding_mb": "max_non_split_rounding",
    "garbage_collection_threshold": "garbage_collection_threshold",
    "roundup_power2_divisions": "roundup_power2_divisions",
    "large_segment_size_mb": "large_segment_size",
    "per_process_memory_fraction": "memory_fraction",
}
# Keys that torch knows and that move no byte of device memory: they are read, checked and dropped.
_SWITCHES = (
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_use_background_threads",
    "pinned_free_catch_all",
    "throw_on_cudamalloc_oom",
    "graph_capture_record_stream_reuse",
)
_COUNTS = (
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
)
KEYS = (*_FIELDS, "backend", *_SWITCHES, *_COUNTS)
_LONGEST: Annotated[int, setting("characters of a setting that are read at most")] = 2000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of the native allocator that move bytes; the defaults are torch's own.

    `roundup_power2_divisions` is one number for all sizes, or 16 of them: for sizes below 2 MiB,
    from 2 MiB, from 4 MiB, …, from 32 GiB. `memory_fraction` is what
    `torch.cuda.set_per_process_memory_fraction` sets, too.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None  # None: blocks of any size are split
    max_non_split_rounding: int | None = None  # None: large_segment_size
    garbage_collection_threshold: float = (
        0.0  # 0: never; and nothing happens without a memory fraction below 1
    )
    roundup_power2_divisions: int | tuple[int, ...] = 0
    large_segment_size: int = LARGE_SEGMENT
    memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        raise_errors(_check(self))

    @classmethod
    def parse(cls, text: str, *, where: str = "PYTORCH_ALLOC_CONF") -> Settings:
        """Read `key:value,key:[…]`; a later key overrides an earlier one, and blanks do not count.

        Where torch reads garbage in silence this is stricter: 2.13 takes `128MB` for 128 and,
        without CUDA, skips unknown keys.
        """
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise InputError.one(
                "the options must be text of a reasonable length",
                where=where,
                hint=f"at most {_LONGEST} characters",
            )
        problems: list[Problem] = []
        values: dict[str, Any] = {}
        for key, value in _pairs(text):
            try:
                _read(key, value, values)
            except _Unusable as finding:
                problems.append(
                    Problem(
                        message=finding.args[0],
                        where=f"{where}.{key}" if key in KEYS else where,
                        hint=finding.args[1],
                    )
                )
        try:
            settings = cls(**values)
        except InputError as error:
            raise InputError(*problems, *error.problems) from None
        raise_errors(problems)
        return settings

    def divisions(self) -> tuple[int, ...] | None:
        """The 16 divisions, or None where none of them rounds (0 and 1 do nothing)."""
        table = self.roundup_power2_divisions
        every = table if isinstance(table, tuple) else (table,) * INTERVALS
        return every if max(every) > 1 else None

    def rounded(self, size: int) -> int:
        """The bytes that a request of `size` > 0 looks for (`round_size`): a multiple of 512, or
        with divisions k the next k-th of its power of two. Example of the source: 1200 with k = 4
        would be 1280, were it not below 512·4."""
        table = self.divisions()
        if table is not None:
            parts = table[min(max(size.bit_length() - 21, 0), INTERVALS - 1)]  # 1 MiB has 21 bits
            if parts > 1 and size > ROUNDING * parts:
                step = (1 << (size.bit_length() - 1)) // parts
                return -(-size // step) * step
        return -(-size // ROUNDING) * ROUNDING


class _Unusable(Exception):
    """A value that cannot be read: (message, hint)."""


def _check(settings: Settings) -> Iterator[Problem]:
    """What torch's own parser refuses, and what no parser lets through (types)."""

    def problem(field: str, hint: str) -> Problem:
        return Problem(
            message=f"`{str(getattr(settings, field))[:80]}` is not valid",
            where=f"allocator.{field}",
            hint=hint,
        )

    large = settings.large_segment_size
    if not isinstance(settings.expandable_segments, bool):
        yield problem("expandable_segments", "True or False")
    if not _whole(large) or not LARGE_REQUEST < large <= LARGEST or large % MIB:
        yield problem("large_segment_size", "must be an integer in MiB, more than 10")
        large = LARGE_SEGMENT
    for field in ("max_split_size", "max_non_split_rounding"):
        value = getattr(settings, field)
        if value is not None and (not _whole(value) or value < large or value % MIB):
            yield problem(field, f"must be an integer in MiB, at least {large // MIB} MiB")
    threshold, fraction = settings.garbage_collection_threshold, settings.memory_fraction
    if not _number(threshold) or not 0 <= threshold < 1:
        yield problem("garbage_collection_threshold", "must be between 0 and 1")
    if not _number(fraction) or not 0 <= fraction <= 1:
        yield problem("memory_fraction", "from 0 to 1")
    table = settings.roundup_power2_divisions
    every = table if isinstance(table, tuple) else (table,)
    if len(every) not in (1, INTERVALS) or (isinstance(table, tuple) and len(table) == 1):
        yield problem("roundup_power2_divisions", f"must be one number, or {INTERVALS}")
    elif not all(_whole(one) and 0 <= one <= LARGEST and not one & (one - 1) for one in every):
        yield problem("roundup_power2_divisions", "must be powers of two, or 0 for none")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """The entries between commas that stand outside of brackets; one trailing comma is allowed, as
    torch allows it."""
    plain = "".join(text.split())
    entries = re.split(r",(?![^\[]*\])", plain)
    if entries[-1] == "":
        del entries[-1]
    for entry in entries:
        key, _, value = entry.partition(":")
        yield key, value


def _read(key: str, value: str, values: dict[str, Any]) -> None:
    if key in _FIELDS:
        values[_FIELDS[key]] = _value(key, value)
    elif key == "backend":
        if value != "native":
            known = value in ("cudaMallocAsync", "hipMallocAsync")
            hint = (
                "its memory follows the driver's own rules; remove `backend`"
                if known
                else "use `native`"
            )
            raise _Unusable(f"backend `{value[:40]}` is not supported", hint)
    elif key in _SWITCHES:
        _switch(value)
    elif key in _COUNTS:
        _count(value)
    else:
        close = nearest(key, KEYS)
        hint = (
            "did you mean " + ", ".join(f"`{one}`" for one in close) + "?"
            if close
            else f"known: {', '.join(_FIELDS)}"
        )
        raise _Unusable(f"unknown option `{key[:80]}`" if key else "an option has no name", hint)


def _value(key: str, value: str) -> Any:
    if key == "expandable_segments":
        return _switch(value)
    if key.endswith("_mb"):
        return _count(value) * MIB
    if key == "roundup_power2_divisions":
        return (
            _table(value[1:-1]) if value.startswith("[") and value.endswith("]") else _count(value)
        )
    if not re.fullmatch(r"([0-9]{1,20}\.?[0-9]{0,20}|\.[0-9]{1,20})([eE]-?[0-9]{1,2})?", value):
        raise _Unusable(f"`{value[:40]}` must be a fraction", "write it like `0.8`")
    fraction = float(value)
    if key == "garbage_collection_threshold" and fraction == 0:
        raise _Unusable(
            "torch does not accept a threshold of 0",
            "omit the option to disable garbage collection",
        )
    return fraction


def _switch(value: str) -> bool:
    if value not in ("True", "False"):
        raise _Unusable(
            f"`{value[:40]}` is neither `True` nor `False`",
            "write `True` or `False` with a capital letter",
        )
    return value == "True"


def _count(value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", value):
        raise _Unusable(f"`{value[:40]}` must be an integer", "write digits only; sizes are in MiB")
    return int(value)


def _table(text: str) -> tuple[int, ...]:
    """`256:1,512:2,1024:4,>:8`: bounds in MiB. The first entry also fills everything below it, `>`
    everything after the last one, and what lies between two bounds that are no neighbours stays 0
    (parseRoundUpPower2Divisions, torch 2.13; up to 2.8 `>` overwrote the last bound as well)."""
    table = [0] * INTERVALS
    last, first = 0, True
    for entry in text.split(","):
        bound, colon, value = entry.partition(":")
        parts = _count(value) if colon else -1
        if bound == ">" and colon:
            table[last + 1 :] = [parts] * (INTERVALS - last - 1)
            continue
        size = _count(bound)
        if not colon or size == 0 or size & (size - 1):
            raise _Unusable(
                f"`{entry[:40]}` is not a size and its divisions",
                "write a power of two and a number, like `256:4` or `>:8`",
            )
        last = min(size.bit_length() - 1, INTERVALS - 1)
        if first:
            table[:last] = [parts] * last
            first = False
        table[last] = parts
    return tuple(table)
