"""The formulas against the trace of the real code, over the whole grid: `python tools/grid.py
[FAMILY ...]` prints it as markdown; `python tools/grid.py --layouts [KIND ...]` does so for layouts
over many GPUs, on rank 0 and on the worst rank.

The cases, and what is compared of each, are those of the conformance tests
(`tests/conformance/grid.py`, `layouts.py`).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.conformance import grid, layouts

WORST = 12  # cases shown
Key = Callable[[grid.Found], str]


def run(name: str) -> tuple[list[grid.Found], int]:
    """The cases of a family (or `models`), and how many both refuse."""
    warnings.simplefilter("ignore")
    found = [
        grid.compare(case) for case in (grid.models() if name == "models" else grid.cases(name))
    ]
    compared = [one for one in found if one is not None]
    return compared, len(found) - len(compared)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def percent(share: float) -> str:
    return f"{100 * share:+.3f} %"


def worst(found: list[grid.Found]) -> Iterator[str]:
    highest = sorted(found, key=lambda one: -abs(one.off))[:WORST]
    yield from table(
        ("case", "trace's peak", "in", "difference"),
        (
            (str(one.case), f"{one.peak / 2**20:.1f} MiB", one.phases[1], percent(one.off))
            for one in highest
        ),
    )


def grouped(name: str, found: list[grid.Found], key: Key) -> Iterator[str]:
    groups: dict[str, list[float]] = {}
    for one in found:
        groups.setdefault(key(one), []).append(abs(one.off))
    rows = (
        (label, str(len(offs)), percent(median(offs)), percent(max(offs)))
        for label, offs in sorted(groups.items())
    )
    yield from table((name, "cases", "median", "worst"), rows)


def parts(found: list[grid.Found]) -> Iterator[str]:
    rows = []
    for part in found[0].parts:
        off = max(found, key=lambda one: abs(one.parts[part]))
        exact = sum(not one.parts[part] for one in found)
        rows.append((part, f"{exact} of {len(found)}", percent(off.parts[part]), str(off.case)))
    yield from table(("part of the peak", "equal to the byte", "worst", "there"), rows)


KEYS: tuple[tuple[str, Key], ...] = (
    (
        "method",
        lambda one: (
            one.case.job.method
            + (f" {one.case.job.quantization}" if one.case.job.quantization != "none" else "")
        ),
    ),
    (
        "checkpointing",
        lambda one: one.case.job.checkpointing + (" reentrant" if one.case.job.reentrant else ""),
    ),
    ("attention", lambda one: one.case.job.attention),
    ("precision", lambda one: one.case.job.precision),
    ("optimizer", lambda one: one.case.job.optimizer),
    ("peak in", lambda one: one.phases[1]),
    ("family", lambda one: one.case.family),
)


def lines(found: list[grid.Found], refused: int) -> Iterator[str]:
    offs = [abs(one.off) for one in found]
    exact = sum(not one.off for one in found)
    bad = [f"{one.case}: {', '.join(wrong)}" for one in found if (wrong := grid.holds(one))]
    moments = sum(one.phases[0] == one.phases[1] for one in found)
    yield (
        f"{len(found)} cases ({refused} more are refused by both): median "
        f"{percent(median(offs))}, worst {percent(max(offs))},"
    )
    yield (
        f"{exact} equal to the byte, the peak in the same phase in {moments}, {len(bad)} "
        "outside the bounds."
    )
    yield ""
    yield from worst(found)
    yield from parts(found)
    for name, key in KEYS:
        yield from grouped(name, found, key)
    yield from bad


def run_layouts(rows: list[layouts.Row]) -> list[layouts.Found]:
    warnings.simplefilter("ignore")
    return [layouts.compare(row) for row in rows]


def shown(side: layouts.Side) -> tuple[str, ...]:
    return f"{side.rank}", f"{side.peak / 2**20:.1f} MiB", percent(side.off)


def layout_lines(found: list[layouts.Found]) -> Iterator[str]:
    """A line for each kind of layout, and one for each layout."""
    kinds = [
        (kind, [one for one in found if one.row.kind == kind])
        for kind in dict.fromkeys(one.row.kind for one in found)
    ]
    summed = []
    for kind, some in [*kinds, ("all", found)]:
        first, worst = (
            [abs(side.off) for side in sides]
            for sides in ([one.first for one in some], [one.worst for one in some])
        )
        unlike = sum(len(set(one.peaks)) > 1 for one in some)
        summed.append(
            (
                kind,
                str(len(some)),
                str(unlike),
                *map(percent, (median(first), max(first), median(worst), max(worst))),
            )
        )
    yield from table(
        (
            "layouts",
            "rows",
            "ranks differ",
            "rank 0: median",
            "worst",
            "worst rank: median",
            "worst",
        ),
        summed,
    )
    lines = ((str(one.row), *shown(one.first), *shown(one.worst)) for one in found)
    yield from table(
        (
            "layout",
            "rank",
            "trace's peak",
            "difference",
            "worst rank",
            "trace's peak",
            "difference",
        ),
        lines,
    )
    yield from (f"{one.row}: {', '.join(one.wrong)}" for one in found if one.wrong)


def main_layouts(kinds: list[str], jobs: int) -> int:
    rows = [row for row in layouts.rows() if not kinds or row.kind in kinds]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        found = [one for some in pool.map(run_layouts, layouts.groups(rows)) for one in some]
    print("\n".join(layout_lines(found)))
    return int(any(one.wrong for one in found))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "family",
        nargs="*",
        help="families, or `models` for real configurations; all of them where none is named",
    )
    parser.add_argument(
        "--layouts",
        action="store_true",
        help="layouts over many GPUs, or those of the kinds that are named",
    )
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.layouts:
        if unknown := set(options.family) - {row.kind for row in layouts.rows()}:
            parser.error(f"no kind {', '.join(sorted(unknown))}")
        return main_layouts(options.family, options.jobs)
    names = options.family or [*grid.NAMES, "models"]
    if unknown := set(names) - {*grid.NAMES, "models"}:
        parser.error(f"no family {', '.join(sorted(unknown))}")
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        done = list(pool.map(run, names))
    found = [one for some, _ in done for one in some]
    print("\n".join(lines(found, sum(refused for _, refused in done))))
    return int(any(grid.holds(one) for one in found))


if __name__ == "__main__":
    raise SystemExit(main())
