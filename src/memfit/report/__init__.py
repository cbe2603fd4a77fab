"""An estimate for people and programs: text, Markdown, JSON. The only place where numbers become
words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memfit.errors import InputError
from memfit.presentation import VIEWS, View
from memfit.registry import nearest

if TYPE_CHECKING:
    from memfit.estimate import Estimate
    from memfit.plan.planning import Plan
    from memfit.plan.study import Study

FORMATS = ("text", "markdown", "json")


def write(
    estimate: Estimate,
    form: str = "text",
    *,
    explain: bool = False,
    width: int = 80,
    colour: bool = False,
    exact: bool = False,
) -> str:
    """Write the estimate in one of `FORMATS`. `explain`: with the formula behind every part.
    `exact`: the text also lists every figure in bytes."""
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

    return text(estimate, width=width, colour=colour, exact=exact) + (
        f"\n\n{working(estimate, width=width)}" if explain else ""
    )


# ------------------------------------------------------------------------ in Python and notebooks
def _estimate_line(found: Estimate) -> str:
    from memfit.report.figures import VERDICTS
    from memfit.report.html import line

    return f"{VERDICTS[found.verdict]}: {line(found)}"


def _estimate_data(found: Estimate) -> dict[str, Any]:
    from memfit.report.codec import to_dict

    return to_dict(found)


def _estimate_html(found: Estimate) -> str:
    from memfit.report.html import estimate_html

    return estimate_html(found)


def _plan_text(found: Plan) -> str:
    from memfit.report.plan import text

    return text(found)


def _plan_data(found: Plan) -> dict[str, Any]:
    from memfit.report.plan import data

    return data(found)


def _study_text(found: Study) -> str:
    from memfit.report.study import text

    return text(found, {})


def _study_data(found: Study) -> dict[str, Any]:
    from memfit.report.study import data

    return data(found, {})


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _preformatted(text: str) -> str:
    from memfit.report.html import preformatted

    return preformatted(text)


VIEWS["Estimate"] = View(line=_estimate_line, text=write, data=_estimate_data, html=_estimate_html)
VIEWS["Plan"] = View(
    line=lambda found: _first_line(_plan_text(found)),
    text=_plan_text,
    data=_plan_data,
    html=lambda found: _preformatted(_plan_text(found)),
)
VIEWS["Study"] = View(
    line=lambda found: _first_line(_study_text(found)),
    text=_study_text,
    data=_study_data,
    html=lambda found: _preformatted(_study_text(found)),
)

__all__ = ["FORMATS", "write"]
