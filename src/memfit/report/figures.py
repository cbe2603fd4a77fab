"""Numbers as people read them: GiB and counts with three digits, bars."""

from __future__ import annotations

from memfit.units import GIB, KIB, MIB

VERDICTS = {"fits": "fits", "tight": "tight", "no": "does not fit", None: "no verdict"}
# The words for a tape's phases; everything else is called what it is called.
PHASES = {
    "step": "optimizer step",
    "evaluate": "evaluation",
    "save": "saving",
    "prepare": "preparation",
}


def gib(size: int) -> str:
    """`74.8`: three significant digits; what would be `0.00` and is not is `<0.01`."""
    if 0 < abs(size) < GIB // 200:
        return "<0.01" if size > 0 else ">-0.01"
    return digits(size / GIB)


def digits(value: float) -> str:
    """Three significant digits, not less than hundredths: `0.02`, `2.94`, `19.3`, `1,430`,
    `12,600`."""
    size = abs(value)
    if size >= 999.5:
        return f"{float(f'{value:.3g}'):,.0f}"
    places = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:,.{places}f}"


def with_unit(size: int) -> str:
    """`56.0 MiB`: for single blocks, which may be small."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{digits(size / unit)} {name}"
    return f"{size} B"


def count(value: int) -> str:
    """`8.03 B`: parameters and the like."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= unit:
            return f"{value / unit:.2f} {name}"
    return str(value)


def percent(part: int, whole: int) -> str:
    if 0 < 200 * part <= whole:
        return "<1 %"
    return f"{100 * part / whole:.0f} %" if whole > 0 else ""


def bar(start: int, size: int, scale: int, width: int, mark: int | None = None) -> str:
    """`size` from `start` on, of `scale` in `width` columns; `mark` draws a line where something
    ends."""
    first, last = start * width // scale, (start + size) * width // scale
    if size > 0:
        last = max(last, first + 1)
    cells = [" "] * (width + 1)
    if mark is not None:
        cells[min(width, mark * width // scale)] = "│"
    cells[first:last] = "█" * (last - first)
    return "".join(cells).rstrip()


# What each way to make a job fit gives up.
KINDS = {
    "same": "the same work for less memory",
    "shorter": "shorter sequences",
    "smaller": "fewer sequences at once",
    "method": "another method",
    "host": "offload to host memory",
    "hardware": "other GPUs",
}


def phase(name: str) -> str:
    return PHASES.get(name, name)
