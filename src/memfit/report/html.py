"""An estimate as a small HTML table, which notebooks show in place of its `repr`."""

from __future__ import annotations

from html import escape

from memfit.estimate import Estimate
from memfit.report.figures import VERDICTS, gib, percent

COLOURS = {"fits": "#1a7f37", "tight": "#9a6700", "no": "#cf222e"}
NUMBERS = ("device", "reserved", "allocated", "usable")


def estimate_html(estimate: Estimate) -> str:
    """Verdict, the four numbers, and a bar for each part of the device memory."""
    colour = COLOURS.get(estimate.verdict or "", "#57606a")
    head = (
        f'<p><b style="color:{colour}">{escape(VERDICTS[estimate.verdict])}</b> '
        f"{escape(line(estimate))}</p>"
    )
    return f'<div style="font-family:system-ui,sans-serif">{head}{numbers(estimate)}</div>'


def line(estimate: Estimate) -> str:
    """`Llama-3.1-8B, finetune lora: 20.9 GiB of 23.5 GiB on RTX 4090`."""
    name = estimate.model.name.rsplit("/", 1)[-1]
    what = estimate.job.task + (f" {estimate.job.method}" if estimate.job.training else "")
    text = f"{name}, {what}: {gib(estimate.device)} GiB"
    if estimate.usable is not None and estimate.gpu is not None:
        text += f" of {gib(estimate.usable[0])} GiB on {estimate.gpu.name}"
    return text


def numbers(estimate: Estimate) -> str:
    sizes = {
        "device": estimate.device,
        "reserved": estimate.memory.reserved,
        "allocated": estimate.memory.allocated,
        "usable": None if estimate.usable is None else estimate.usable[0],
    }
    rows = [row(name, size, "") for name in NUMBERS if (size := sizes[name]) is not None]
    whole = max(estimate.device, 1)
    for name, size in estimate.parts.items():
        share = max(0.0, min(100.0, 100 * size / whole))
        bar = f'<div style="background:#0969da;height:.7em;width:{share:.1f}%;min-width:1px"></div>'
        rows.append(row(f"&nbsp;&nbsp;{escape(name)}", size, percent(size, whole), bar))
    return f"<table>{''.join(rows)}</table>"


def row(name: str, size: int, share: str, bar: str = "") -> str:
    return (
        f"<tr><td>{name}</td><td style='text-align:right'>{gib(size)} GiB</td>"
        f"<td style='text-align:right'>{share}</td><td style='width:16em'>{bar}</td></tr>"
    )


def preformatted(text: str) -> str:
    """A plain report in a notebook, with its columns kept."""
    return f"<pre>{escape(text)}</pre>"


__all__ = ["estimate_html", "line", "preformatted"]
