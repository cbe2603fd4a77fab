"""Records as text: what one run held beside what was predicted, and a line for each of many."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.measure.compare import Predicted
from memfit.measure.record import Record
from memfit.report.figures import gib


def size(count: int | None) -> str:
    """A small model's figures would be `0.00` GiB."""
    if count is None:
        return "-"
    return f"{gib(count)} GiB" if count >= 2**27 else f"{count / 2**20:.2f} MiB"


def line(record: Record) -> str:
    """One case of a campaign."""
    what = f"{size(record.allocated)} allocated, {size(record.reserved)} reserved" if record.result == "ok" else record.error[:100]
    return f"{record.result:<8}{record.seconds:6.1f} s  {record.case}  {what}"


def table(records: Sequence[Record]) -> str:
    if not records:
        return "nothing was measured: every case has its record, or the budget is spent"
    rows = [line(one) for one in records]
    ends = {result: sum(one.result == result for one in records) for result in ("ok", "oom", "timeout", "error")}
    return "\n".join([*rows, "", ", ".join(f"{count} {result}" for result, count in ends.items() if count)])


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
        lines.append(f"parameters  {record.parameters:,}, {record.trainable or 0:,} of them trained")
    lines.append("")
    for name in ("allocated", "reserved"):
        measured, expected = getattr(record, name), getattr(predicted, name) if predicted is not None else None
        if measured is None:
            continue
        beside = f"{size(expected):>12} predicted by {predicted.by}, {expected / measured - 1:+.2%}" if expected and predicted else ""
        lines.append(f"{name:<11}{size(measured):>12} measured {beside}".rstrip())
    for name, count in record.device.items():
        lines.append(f"{name:<11}{size(count):>12} on the device")
    if record.tokens_per_second:
        rate = f", {record.flops_per_second / 1e12:.3g} TFLOP/s of the model" if record.flops_per_second else ""
        lines.append(f"{'speed':<11}{record.tokens_per_second:>8,.0f} tokens/s{rate}")
    if record.phases:
        lines += ["", f"  {'phase':<22}{'allocated':>12}{'reserved':>12}{'seconds':>10}"]
        for peak in record.phases:
            name = f"{peak.phase}, step {peak.step}"
            lines.append(f"  {name:<22}{size(peak.allocated):>12}{size(peak.reserved):>12}{peak.seconds:10.3f}")
    return "\n".join(lines)
