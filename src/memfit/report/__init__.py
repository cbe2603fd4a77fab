"""An estimate for people and programs: text, Markdown, JSON. The only place where numbers become
words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.errors import InputError
from memfit.registry import nearest

if TYPE_CHECKING:
    from memfit.estimate import Estimate

FORMATS = ("text", "markdown", "json")


def write(
    estimate: Estimate,
    form: str = "text",
    *,
    explain: bool = False,
    width: int = 80,
    colour: bool = False,
) -> str:
    """The estimate in one of `FORMATS`, with the working of every part if asked to `explain`."""
    if form == "json":
        from memfit.report.codec import to_json

        return to_json(estimate, explain=explain)
    if form not in FORMATS:
        close = nearest(form, FORMATS, 1)
        raise InputError.one(
            f"unknown format `{form[:40]}`",
            where="format",
            hint=f"one of {', '.join(close or FORMATS)}",
        )
    from memfit.report.explain import working

    if form == "markdown":
        from memfit.report.markdown import markdown

        return markdown(estimate) + (f"\n\n```\n{working(estimate)}\n```" if explain else "")
    from memfit.report.text import text

    return text(estimate, width=width, colour=colour) + (
        f"\n\n{working(estimate, width=width)}" if explain else ""
    )


__all__ = ["FORMATS", "write"]
