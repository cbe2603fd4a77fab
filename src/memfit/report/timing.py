"""The working of the time: every kind of kernel, what it computes and moves, and what share of the
GPU's figures that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from memfit.constants import module_constants
from memfit.estimate import Estimate
from memfit.hardware.rates import TRAINED, Rates, rates
from memfit.report.figures import phase, with_unit
from memfit.report.pace import duration
from memfit.simulate.time import BESIDE
from memfit.simulate.working import Alike

SMALL = 0.01  # of the step: kinds that take less are told together
PASSES = {"prefill": "prefill", "decode": "the last token"}
# By part of a step: the constants that decide it beside the measured kernels.
ORIGINS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "attention": {"memfit.hardware.rates": ("BACKWARD", "KERNELS")},
    "launch": {"memfit.hardware.rates": ("LAUNCHES", "TRAINED")},
    "host": {
        "memfit.hardware.rates": ("PINNED",),
        "memfit.simulate.host_step": ("DEEPSPEED", "TORCH"),
    },
    "communication": {"memfit.hardware.collectives": ("PORT", "CALL", "STEP", "HOP")},
}
WAITS = {
    "optimizer": "its kernels, which move the bytes of the optimizer's row",
    "communication": ("communication that kernels do not hide, and its cost to them"),
    "host": ("copies to and from CPU memory that kernels do not hide, and the CPU optimizer"),
    "bubble": "work of the other stages before and after this one",
}


def timing(estimate: Estimate) -> Iterator[str]:
    """The lines on time; none if the time is not known."""
    known, time = None if estimate.gpu is None else rates(estimate.gpu), estimate.time
    if known is None or not estimate.kernels:
        return
    if time is None:
        for name, words in PASSES.items():
            if some := [one for one in estimate.kernels if one.phase == name]:
                yield from ("", f"time in detail: {words}")
                yield from parts(some, dict(sums(some)), known)
    else:
        yield from ("", f"time in detail: an optimizer step of {duration(time.seconds)}")
        yield from parts(estimate.kernels, dict(time.parts), known)
        if "launch" in time.parts:
            yield from ("", f"launch  {duration(time.parts['launch'])}")
            yield (
                f"  {time.kernels:,} kernels, {known.eager * TRAINED * 1000000.0:.1f} µs "
                "of launch time each, minus their own time"
            )
        yield from ("", f"MFU  {100 * time.mfu:.1f} %, HFU {100 * time.hfu:.1f} %")
        yield (
            f"  {flop(time.model_flops)} model FLOPs, {flop(time.flops)} in total, "
            f"peak {flop(time.peak)}/s in {duration(time.seconds)}"
        )
    yield from ("", "rates", f"  {known.origin}")
    yield from origins({} if time is None else dict(time.parts))


def origins(parts: Mapping[str, float]) -> Iterator[str]:
    """The constants behind each part of a step that takes 1 % of it or more, with their origins."""
    whole = sum(parts.values())
    for part, places in ORIGINS.items():
        if parts.get(part, 0.0) < SMALL * whole or part not in parts:
            continue
        for module, names in places.items():
            for one in module_constants(module):
                if one.name in names:
                    kind, what, source = one.origin
                    yield f"  {part}, {kind}: {what} ({source})"


def sums(kernels: Sequence[Alike]) -> Iterator[tuple[str, float]]:
    for part, some in groupby(sorted(kernels, key=lambda one: one.part), key=lambda one: one.part):
        if part != BESIDE:
            yield part, sum(one.total for one in some)


def parts(kernels: Sequence[Alike], told: dict[str, float], known: Rates) -> Iterator[str]:
    whole = sum(told.values())
    for part, seconds in told.items():
        if part == "launch":
            continue
        yield from ("", f"{part}  {duration(seconds)}, {100 * seconds / whole:.0f} %")
        mine = [one for one in kernels if one.part == part]
        yield from listed(mine, whole, known)
        if (rest := seconds - sum(one.total for one in mine)) > SMALL * seconds:
            yield f"  {duration(rest)}: {WAITS.get(part, 'the rest')}"
    if beside := [one for one in kernels if one.part == BESIDE]:
        yield from (
            "",
            (f"on other streams  {duration(sum(one.total for one in beside))}"),
        )
        yield from listed(beside, whole, known)


def listed(kernels: Sequence[Alike], whole: float, known: Rates) -> Iterator[str]:
    small = [one for one in kernels if one.total < SMALL * whole]
    for one in kernels:
        if one.total >= SMALL * whole:
            yield (
                f"  {one.times:,} × {' '.join(filter(None, (one.where, one.op)))}, "
                f"{phase(one.phase)}"
            )
            yield f"      {each(one, known)}, in all {duration(one.total)}"
    if small:
        yield (
            f"  {sum(one.times for one in small):,} more of {len(small)} kinds: "
            f"{duration(sum(one.total for one in small))}"
        )


def each(one: Alike, known: Rates) -> str:
    """`962 GFLOP, 400.00 MiB moved: 1.36 ms, 72 % of 989 TFLOP/s`, or of the bandwidth where that
    is nearer."""
    takes = f"{one.seconds * 1e3:.3g} ms"
    if one.ranks:
        return f"{with_unit(one.moved)} among {one.ranks}: {takes}"
    shares = [(one.moved / one.seconds / known.bandwidth, f"{known.bandwidth / 1e12:.3g} TB/s")]
    if one.flops:
        full = known.rate(one.math)
        shares.append((one.flops / one.seconds / full, f"{flop(full)}/s"))
    share, figure = max(shares)
    return (
        f"{flop(one.flops) + ', ' if one.flops else ''}{with_unit(one.moved)} moved: "
        f"{takes}, {100 * share:.0f} % of {figure}"
    )


def flop(value: float) -> str:
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.3g} {name}FLOP"
    return f"{value:.0f} FLOP"
