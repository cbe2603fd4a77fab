"""An estimate as Markdown, for issues, pull requests and notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memfit.estimate import Estimate
from memfit.report.figures import count, gib, percent
from memfit.report.pace import pace
from memfit.report.run import whole_run_lines
from memfit.report.text import (
    WHAT,
    device_words,
    host_words,
    job_words,
    ladder,
    layout_words,
    merged,
    moment_words,
    place,
    remarks,
    script_words,
    source_words,
    verdict,
)


def markdown(estimate: Estimate) -> str:
    lines = [
        *_head(estimate),
        *_numbers(estimate),
        *_pace(estimate),
        *_parts(estimate),
        *_moments(estimate),
        *_run(estimate),
    ]
    lines += [f"- {escape(line.strip())}" for line in ladder(estimate)]
    if estimate.problems:
        lines += ["", *(f"> {escape(line)}  " for line in remarks(estimate.problems))]
    return "\n".join(lines)


def _head(estimate: Estimate) -> Iterator[str]:
    first, *more = verdict(estimate)
    yield f"**{escape(first)}**"
    yield ""
    yield " ".join(f"{escape(words)}." for words in _subject(estimate))
    for line in more:
        yield f"{escape(line[:1].upper() + line[1:])}."
    yield ""


def _subject(estimate: Estimate) -> Iterator[str]:
    """What was asked about, and by what it was answered."""
    known, script = estimate.parameters, estimate.script
    trained = (
        f", {count(known.trainable)} trained" if estimate.job.training or script is not None else ""
    )
    active = f", {count(known.active)} active" if known.active != known.total else ""
    if script is None:
        yield f"{estimate.model.name}: {job_words(estimate.job)}"
    else:
        yield script_words(script)
    if estimate.strategy:
        yield f"Layout {layout_words(estimate)}"
    yield f"{count(known.total)} parameters{active}{trained}"
    yield f"By {source_words(estimate)}"


def _numbers(estimate: Estimate) -> Iterator[str]:
    memory = estimate.memory
    rows = [
        ("device", estimate.device),
        ("reserved", memory.reserved),
        ("allocated", memory.allocated),
    ]
    rows.append(("usable", None if estimate.usable is None else estimate.usable[0]))
    words = {**WHAT, "device": device_words(estimate)}
    known = [(name, gib(size), words[name]) for name, size in rows if size is not None]
    known.append(("host", gib(estimate.host.size), WHAT["host"] + host_words(estimate.host)))
    yield from table(("number", "GiB", "is"), known)
    yield ""


def _pace(estimate: Estimate) -> Iterator[str]:
    lines = [line.strip() for line in pace(estimate)]
    if lines:
        more = f" ({lines[1]})" if lines[1:] else ""
        yield from (f"{lines[0][0].upper()}{lines[0][1:]}{more}.", "")


def _parts(estimate: Estimate) -> Iterator[str]:
    rows = [
        (name, gib(size), percent(size, estimate.device)) for name, size in estimate.parts.items()
    ]
    yield from table(("part", "GiB", "of device"), rows)
    yield ""


def _run(estimate: Estimate) -> Iterator[str]:
    lines = list(whole_run_lines(estimate, 80))
    if lines:
        yield from ("```", *lines, "```", "")


def _moments(estimate: Estimate) -> Iterator[str]:
    memory = estimate.memory
    if memory.at is None:
        return
    yield f"The peak of live tensors comes {escape(place(memory.at, estimate))}."
    yield ""
    rows = [
        (moment_words(one), gib(one.allocated), "" if one.reserved is None else gib(one.reserved))
        for one in merged(memory.timeline)
    ]
    yield from table(("moment", "allocated", "reserved"), rows)
    yield ""


def table(
    head: tuple[str, ...],
    rows: Iterable[tuple[str, ...]],
    words: frozenset[str] = frozenset({"is"}),
) -> Iterator[str]:
    """Numbers are set right: every column but the first and those headed by `words`."""
    yield "| " + " | ".join(head) + " |"
    yield "|---" + "".join("|---" if name in words else "|---:" for name in head[1:]) + "|"
    for row in rows:
        yield "| " + " | ".join(escape(cell) for cell in row) + " |"


def escape(text: str) -> str:
    """Nothing that a name brings along becomes markup."""
    for letter in "\\`*_|<>[]":
        text = text.replace(letter, f"\\{letter}")
    return text
