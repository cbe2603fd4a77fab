"""What memfit says of a source that had no say: everything that is calibrated on published rows,
calibrated again without the source; and each place of the code that names a publisher."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from pkgutil import iter_modules
from typing import get_args

from memfit.band import ENOUGH_SOURCES, TAIL, Residual, by_regime, read_off, residuals
from memfit.constants import Constant, Kind, all_constants
from memfit.job_checks import NEWEST
from memfit.lazy_dataclass import dataclass
from memfit.truth import sources
from memfit.truth.rows import Row, read_rows

ROOT = Path(__file__).resolve().parents[1]
# That a choice without a source may take, the largest first: those that TAIL was chosen among.
TAILS = (0.06, 0.05, 0.04, TAIL, 0.03, 0.026, 0.02, 0.015)
LEAST = 0.85  # of each regime must be covered, as when the tail of the likely range was chosen
CALIBRATED = ("memfit.band", "memfit.hardware", "memfit.plan", "memfit.runs", "memfit.simulate")
# Readers named after software that people may name in a question, beside the libraries that have
# versions: such a word is an option's. The publisher's repository is looked for nevertheless.
SOFTWARE = frozenset(NEWEST) | {"ms_swift", "optimum", "qwen", "torchao", "transformers_docs"}
# A citation says where a fact comes from; it decides nothing.
CITING = frozenset({"cite", "source", "note", "origin", "provenance"})
ORIGINS = frozenset(get_args(Kind))


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A source, and what all others say of its `cases`: the tail that they choose, the ends of the
    likely range with it, and the share of the cases within."""

    source: str
    cases: int
    tail: float
    covered: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A constant that was solved from published figures, and the published rows whose source it
    names: they would be no evidence."""

    name: str
    what: str
    source: str
    rows: int


@dataclass(frozen=True, kw_only=True)
class Blind:
    """All that is calibrated, with what is left of it where a source had no say."""

    left_out: tuple[LeftOut, ...]
    fits: tuple[Fit, ...]
    places: tuple[str, ...]

    @property
    def over_sources(self) -> float:
        return sum(one.covered for one in self.left_out) / len(self.left_out)

    @property
    def over_cases(self) -> float:
        cases = sum(one.cases for one in self.left_out)
        return sum(one.cases * one.covered for one in self.left_out) / cases


def blind() -> Blind:
    """Of the bundled figures."""
    return Blind(
        left_out=tuple(left_out(residuals())), fits=tuple(fits()), places=tuple(places(ROOT))
    )


def left_out(known: Sequence[Residual]) -> Iterator[LeftOut]:
    """For each source the band of all others, with a tail that they alone choose."""
    usable = [one for one in known if one.counts]
    for source in sorted({one.source for one in usable}):
        tail = chosen_tail([one for one in known if one.source != source])
        said = read_off([one for one in usable if one.source != source], tail)
        mine = [one for one in usable if one.source == source]
        yield LeftOut(
            source=source,
            cases=len(mine),
            tail=tail,
            covered=sum(map(said.holds, mine)) / len(mine),
            low=said.low - 1,
            high=said.high - 1,
        )


def chosen_tail(known: Sequence[Residual]) -> float:
    """The largest tail with which each regime of enough sources is covered, by the ends of the
    other sources; the smallest of all where none does it."""
    for tail in TAILS:
        lines = [one for one in by_regime(known, tail) if one.sources >= ENOUGH_SOURCES]
        if all(one.left_out is not None and one.left_out >= LEAST for one in lines):
            return tail
    return min(TAILS)


def fits() -> Iterator[Fit]:
    """Constants whose origin is `fitted`, but the band's tail, which `left_out` chooses anew."""
    known = origins()
    for one in all_constants(*CALIBRATED):
        if one.origin.kind == "fitted" and one.name != "TAIL":
            yield Fit(
                name=f"{one.module.removeprefix('memfit.')}.{one.name}",
                what=one.origin.what,
                source=one.origin.source,
                rows=sum(named(origin, one) for origin in known),
            )


def origins() -> list[str]:
    """The repository of each bundled row."""
    return [row.origin for row in read_rows() if isinstance(row, Row)]


def named(origin: str, one: Constant) -> bool:
    return origin.lower() in one.origin.source.lower()


# ------------------------------------------------------------------------ names of publishers
def publishers() -> re.Pattern[str]:
    """Repositories that rows were published in, and the readers' short names for them."""
    whole = {origin for origin in origins() if "/" in origin and " " not in origin}
    short = {found.name for found in iter_modules(sources.__path__)} - SOFTWARE
    words = [re.escape(name) for name in whole] + [name.replace("_", "[-_]?") for name in short]
    return re.compile(rf"(?<![\w/-])(?:{'|'.join(sorted(words))})(?![\w/-])", re.IGNORECASE)


def places(root: Path) -> Iterator[str]:
    """`file:line: text` wherever code outside of `truth/` names a publisher. Comments, docstrings
    and citations may: they decide nothing."""
    pattern = publishers()
    for path in sorted(root.rglob("*.py")):
        if root / "truth" in path.parents:
            continue
        for line, text in code_words(ast.parse(path.read_text(encoding="utf-8"))):
            if pattern.search(text):
                yield f"{path.relative_to(root)}:{line}: {text[:80]}"


def code_words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Strings and names of a program, without docstrings and citations."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.keyword) and node.arg in CITING:
            continue
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name) and called.id in ORIGINS:
            continue
        for text in (
            getattr(node, "value", None) if isinstance(node, ast.Constant) else None,
            *(getattr(node, field, None) for field in ("id", "attr", "name", "arg")),
        ):
            if isinstance(text, str):
                yield getattr(node, "lineno", 0), text
        yield from code_words(node)


__all__ = ["Blind", "Fit", "LeftOut", "blind", "chosen_tail", "left_out", "places"]
