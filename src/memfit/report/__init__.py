"""An estimate for people and programs: text, Markdown, JSON. The only place where numbers become
words."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError
from memfit.presentation import VIEWS, View
from memfit.registry import nearest

if TYPE_CHECKING:
    from memfit.estimate import Estimate
    from memfit.plan.study import Study
    from memfit.serving.result import ServingAnswer

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


def _study_text(found: Study) -> str:
    from memfit.report.study import text

    return text(found, {})


def _study_data(found: Study) -> dict[str, Any]:
    from memfit.report.study import data

    return data(found, {})


def _module_view(name: str) -> View:
    """The view of answers that `memfit.report.<name>` writes by `text` and `data`."""

    def text(found: Any) -> str:
        written: str = import_module(f"memfit.report.{name}").text(found)
        return written

    def data(found: Any) -> dict[str, Any]:
        made: dict[str, Any] = import_module(f"memfit.report.{name}").data(found)
        return made

    return View(
        line=lambda found: _first_line(text(found)),
        text=text,
        data=data,
        html=lambda found: _preformatted(text(found)),
    )


def _serving_line(found: ServingAnswer) -> str:
    name = found.model.rpartition("/")[2]
    return f"{name}, {found.title}: {_first_line(found.summary())}"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _preformatted(text: str) -> str:
    from memfit.report.html import preformatted

    return preformatted(text)


VIEWS["Estimate"] = View(line=_estimate_line, text=write, data=_estimate_data, html=_estimate_html)
VIEWS["Plan"] = _module_view("plan")
VIEWS["EnginePlan"] = _module_view("engine_plan")
VIEWS["ServingAnswer"] = replace(_module_view("engine_answer"), line=_serving_line)
VIEWS |= dict.fromkeys(("Card", "Shelf", "Smallests"), _module_view("card"))
VIEWS["Study"] = View(
    line=lambda found: _first_line(_study_text(found)),
    text=_study_text,
    data=_study_data,
    html=lambda found: _preformatted(_study_text(found)),
)

__all__ = ["FORMATS", "write"]
