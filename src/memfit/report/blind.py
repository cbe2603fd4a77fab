"""What memfit says of sources that had no say, as text, Markdown and JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from memfit.report.accuracy import share, signed
from memfit.report.markdown import table
from memfit.report.tables import columns
from memfit.truth.blind import Blind

HEAD = ("source left out", "cases", "tail %", "covered %", "from %", "to %")
FIT_HEAD = ("constant", "rows", "fitted to")
LEGEND = (
    "For each source the likely range is calibrated on all others, its tail too: what share of "
    "the source's figures lies within. Figures of reserved and device memory, one length. rows: "
    "published rows of the table whose source a fitted constant names; they would be no evidence. "
    "No constant of a memory prediction is fitted."
)
NONE = "no code outside of truth/ names a publisher"


def rows(found: Blind) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [
        (
            one.source,
            str(one.cases),
            share(one.tail),
            share(one.covered, 0),
            signed(one.low),
            signed(one.high),
        )
        for one in found.left_out
    ]
    cases = str(sum(one.cases for one in found.left_out))
    lines.append(("all, averaged over sources", cases, "", share(found.over_sources, 0), "", ""))
    lines.append(("all, averaged over cases", cases, "", share(found.over_cases, 0), "", ""))
    return lines


def fits(found: Blind) -> list[tuple[str, ...]]:
    return [(one.name, str(one.rows), one.source) for one in found.fits]


def places(found: Blind) -> list[str]:
    return ["code that names a publisher:", *found.places] if found.places else [NONE]


def text(found: Blind, width: int = 80) -> str:
    fitted = [
        line
        for name, count, source in fits(found)
        for line in (
            f"{name}: {count} rows of the table",
            *textwrap.wrap(source, width, initial_indent="  ", subsequent_indent="  "),
        )
    ]
    return "\n".join(
        [
            columns(HEAD, rows(found), frozenset(range(1, len(HEAD)))),
            "",
            "constants fitted to published figures (speed alone)",
            *fitted,
            "",
            *places(found),
            "",
            textwrap.fill(LEGEND, width),
        ]
    )


def markdown(found: Blind) -> str:
    return "\n".join(
        [
            *table(HEAD, rows(found), frozenset({HEAD[0]})),
            "",
            *table(FIT_HEAD, fits(found), frozenset({"constant", "fitted to"})),
            "",
            *(f"{line}  " for line in places(found)),
            "",
            LEGEND,
        ]
    )


def data(found: Blind) -> dict[str, Any]:
    return asdict(found) | {"over_sources": found.over_sources, "over_cases": found.over_cases}
