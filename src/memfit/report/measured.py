"""Records as text: measured and predicted memory of one run, or one line for each of many."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from memfit.measure.compare import Beside, Predicted
from memfit.measure.record import Record
from memfit.report.figures import gib
from memfit.report.markdown import table as table_of
from memfit.truth.statistics import Figures, figures

SHOWN = 12  # kinds of allocations that one side alone has
HEAD = ("predicted by", "on", "counter", "cases", "median", "p95", "worst", "under by > 1 %")
COMPARED = ("allocated", "reserved")


def size(count: int | None) -> str:
    """A small model's figures would be `0.00` GiB."""
    if count is None:
        return "-"
    return f"{gib(count)} GiB" if count >= 2**27 else f"{count / 2**20:.2f} MiB"


def line(record: Record) -> str:
    """One case of a campaign."""
    what = (
        f"{size(record.allocated)} allocated, {size(record.reserved)} reserved"
        if record.result == "ok"
        else record.error[:100]
    )
    return f"{record.result:<8}{record.seconds:6.1f} s  {record.case}  {what}"


def table(records: Sequence[Record]) -> str:
    if not records:
        return "nothing was measured: every case has a record, or the budget is used up"
    rows = [line(one) for one in records]
    ends = {
        result: sum(one.result == result for one in records)
        for result in ("ok", "oom", "timeout", "error")
    }
    return "\n".join(
        [*rows, "", ", ".join(f"{count} {result}" for result, count in ends.items() if count)]
    )


def text(record: Record, predicted: Predicted | None) -> str:
    """One case in full."""
    where = record.gpu or "CPU, by torch's profiler"
    lines = [f"{record.result}: {record.case} on {where}"]
    if record.error:
        lines.append(record.error)
    if record.asked is not None:
        lines.append(f"asked for {size(record.asked)} with {size(record.free)} free")
    said = [f"{name} {version}" for name, version in record.versions.items() if version]
    lines += ["", f"versions    {', '.join(said)}"]
    if record.parameters is not None:
        lines.append(
            f"parameters  {record.parameters:,}, {record.trainable or 0:,} of them trained"
        )
    lines.append("")
    for name in ("allocated", "reserved"):
        measured, expected = (
            getattr(record, name),
            getattr(predicted, name) if predicted is not None else None,
        )
        if measured is None:
            continue
        expected = expected if record.result == "ok" else None
        beside = (
            f"{size(expected):>12} predicted by {predicted.by}, {expected / measured - 1:+.2%}"
            if expected and predicted
            else ""
        )
        lines.append(f"{name:<11}{size(measured):>12} measured {beside}".rstrip())
    for name, count in record.device.items():
        lines.append(f"{name:<11}{size(count):>12} device memory")
    if record.tokens_per_second:
        rate = (
            f", {record.flops_per_second / 1e12:.3g} TFLOP/s of the model"
            if record.flops_per_second
            else ""
        )
        lines.append(f"{'speed':<11}{record.tokens_per_second:>8,.0f} tokens/s{rate}")
    if record.phases:
        lines += ["", f"  {'phase':<22}{'allocated':>12}{'reserved':>12}{'seconds':>10}"]
        for peak in record.phases:
            name = f"{peak.phase}, step {peak.step}"
            lines.append(
                "  "
                f"{name:<22}{size(peak.allocated):>12}{size(peak.reserved):>12}{peak.seconds:10.3f}"
            )
    return "\n".join(lines)


def grouped(found: Sequence[Beside]) -> dict[tuple[str, str, str], Figures]:
    """By who predicted, on what, and the counter."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for one in found:
        for name in COMPARED:
            error = one.error(name)
            if error is not None and one.predicted is not None:
                groups.setdefault((one.predicted.by, one.record.gpu or "CPU", name), []).append(
                    error
                )
    return {key: known for key, errors in groups.items() if (known := figures(errors)) is not None}


def lacking(found: Sequence[Beside], side: str) -> list[tuple[str, str, int, int]]:
    """(phase, operation, count, bytes) of the allocations that only one side has, over all records,
    most bytes first."""
    times: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for one in found:
        for kind in getattr(one.compared, side, ()):
            times[kind.phase, kind.op] += kind.times
            sizes[kind.phase, kind.op] += kind.bytes
    return [(phase, op, times[phase, op], count) for (phase, op), count in sizes.most_common()]


def comparison(found: Sequence[Beside], worst: int = 0) -> str:
    """Records and predictions compared: the figures, the decisions, and event by event."""
    ends = Counter(one.record.result for one in found)
    lines = [
        f"{len(found)} records: "
        + ", ".join(
            f"{ends[name]} {name}" for name in ("ok", "oom", "timeout", "error") if ends[name]
        ),
        "",
    ]
    lines.append("{:<14}{:<28}{:<11}{:>6}{:>9}{:>9}{:>10}{:>16}".format(*HEAD))
    for (by, where, name), known in sorted(grouped(found).items()):
        shares = f"{known.median:>9.3%}{known.p95:>9.3%}{known.worst:>+10.3%}{known.under:>16.1%}"
        lines.append(f"{by:<14}{where[:26]:<28}{name:<11}{known.cases:>6}{shares}")
    decided = [one.decided for one in found if one.decided is not None]
    if decided:
        lines += ["", f"fits or not: {sum(decided)} of {len(decided)} predicted correctly"]
    compared = [one.compared for one in found if one.compared is not None]
    if compared:
        events, same = sum(one.events for one in compared), sum(one.same for one in compared)
        held, alike = sum(one.bytes for one in compared), sum(one.same_bytes for one in compared)
        told = (
            f"{same:,} of {events:,} allocations match the trace, "
            f"{alike / max(1, held):.3%} of the bytes"
        )
        lines += ["", f"event by event, {len(compared)} records: {told}"]
        for side, title in (
            ("missed", "measured, not predicted"),
            ("extra", "predicted, not measured"),
        ):
            rows = lacking(found, side)
            lines += [f"  {title}:"] if rows else []
            lines += [
                f"    {phase:<10}{times:>6} x {op[:70] or '-':<70}{size(count):>12}"
                for phase, op, times, count in rows[:SHOWN]
            ]
    silent = Counter(one.why for one in found if one.why)
    lines += (
        ["", *(f"not predicted, {count}: {why}" for why, count in silent.most_common())]
        if silent
        else []
    )
    far = sorted(
        (one for one in found if one.error("allocated") is not None),
        key=lambda one: -abs(one.error("allocated") or 0),
    )[:worst]
    lines += (
        [
            "",
            *(
                (
                    f"{one.error('allocated') or 0:>+9.3%}  {size(one.record.allocated):>12} "
                    f" {one.record.case}"
                )
                for one in far
            ),
        ]
        if far
        else []
    )
    return "\n".join(lines)


def comparison_markdown(found: Sequence[Beside], worst: int = 0) -> str:
    """The table of figures as Markdown, the rest as it is printed."""
    head, _, rest = comparison(found, worst).partition("\n\n")
    rows = [
        (
            by,
            where,
            name,
            str(one.cases),
            f"{one.median:.3%}",
            f"{one.p95:.3%}",
            f"{one.worst:+.3%}",
            f"{one.under:.1%}",
        )
        for (by, where, name), one in sorted(grouped(found).items())
    ]
    _, _, rest = rest.partition("\n\n")
    return "\n".join(
        [
            f"{head}.",
            "",
            *table_of(HEAD, rows, frozenset(HEAD[:3])),
            *(["", "```", rest.strip(), "```"] if rest.strip() else []),
        ]
    )


def comparison_data(found: Sequence[Beside]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "figures": [
            {"by": by, "on": where, "counter": name, **dataclasses.asdict(known)}
            for (by, where, name), known in sorted(grouped(found).items())
        ],
        "records": [
            {
                "case": one.record.case,
                "result": one.record.result,
                "measured": one.record.allocated,
                "predicted": None if one.predicted is None else one.predicted._asdict(),
                "why": one.why,
                "decided": one.decided,
                "events": None
                if one.compared is None
                else {
                    **vars(one.compared),
                    "missed": [kind._asdict() for kind in one.compared.missed],
                    "extra": [kind._asdict() for kind in one.compared.extra],
                },
            }
            for one in found
        ],
    }
