"""A serving engine's answer as text, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from memfit.report.figures import count, gib
from memfit.report.pace import duration
from memfit.serving.result import Pool, ServingAnswer, Speed
from memfit.units import GIB

MARGIN = 11
BAR = 30


def write(
    answer: ServingAnswer, form: str = "text", *, explain: bool = False, width: int = 80
) -> str:
    """The answer in one of `FORMATS`, with the working of every pool on `explain`."""
    if form == "json":
        return json.dumps(data(answer), indent=2, ensure_ascii=False)
    body = text(answer, width=width, explain=explain)
    return f"```\n{body}\n```" if form == "markdown" else body


def data(answer: ServingAnswer) -> dict[str, Any]:
    """Everything, for programs."""
    made = dataclasses.asdict(answer)
    made |= {
        "fits": answer.fits,
        "verdict": answer.verdict,
        "device": answer.device,
        "host": answer.host,
        "figures": dict(answer.figures),
    }
    return made


def text(answer: ServingAnswer, *, width: int = 80, explain: bool = False) -> str:
    """The verdict, the pools of one GPU, and the lines of the engine's log."""
    sections = (
        verdict(answer),
        subject(answer),
        pools(answer),
        working(answer) if explain else iter(()),
        log_lines(answer),
        remarks(answer),
    )
    lines: list[str] = []
    for section in sections:
        found = [part for line in section for part in folded(line, width)]
        lines += ["", *found] if lines and found else found
    return "\n".join(lines)


def verdict(answer: ServingAnswer) -> Iterator[str]:
    """The answer in one line; for a refusal, the engine's own error and what works."""
    on = f" on {answer.gpu}" if answer.gpu else ""
    on += f", each of {answer.gpus}" if answer.gpus > 1 else ""
    if answer.failure:
        yield f"does not start{on}"
        yield f"{answer.title} stops with: {answer.failure}"
        if answer.remedy:
            yield f"works: {answer.remedy}"
        return
    room = f" of {gib(answer.usable)} GiB" if answer.usable is not None else ""
    yield f"{'fits' if room else 'needs'}: {gib(answer.device)} GiB{room}{on}"
    yield from offloaded(answer)
    tokens = answer.figures.get("kv_tokens")
    if tokens:
        length = int(answer.figures.get("max_concurrency_len", 0))
        times = answer.figures.get("max_concurrency", 0.0)
        users = f", {times:.2f} requests of {length:,} tokens" if length else ""
        yield f"KV cache for {int(tokens):,} tokens{users}"
    step = answer.figures.get("max_num_batched_tokens")
    if step:
        requests, length = (int(answer.figures[one]) for one in ("max_num_seqs", "max_model_len"))
        yield (
            f"no KV cache: a step takes {int(step):,} tokens of at most {requests:,} requests, "
            f"each of up to {length:,} tokens"
        )


def offloaded(answer: ServingAnswer) -> Iterator[str]:
    """What the CPU computes."""
    one = answer.offload
    if one is None:
        return
    rest = f"from {gib(answer.host)} GiB of its memory"
    if one.on_gpu < one.layers:
        yield f"{one.on_gpu} of {one.layers} layers on the GPU; the CPU computes the others {rest}"
    else:
        yield f"the CPU computes the experts of {one.cpu_experts} layers {rest}"


def subject(answer: ServingAnswer) -> Iterator[str]:
    size = f": {count(answer.parameters)} parameters" if answer.parameters else ""
    yield f"{'model':<{MARGIN}}{answer.model}{size}"
    if answer.origin:
        yield f"{'from':<{MARGIN}}{answer.origin}"
    yield f"{'engine':<{MARGIN}}{answer.title} {answer.version}".rstrip()
    yield from speed(answer)
    for place, line in enumerate(answer.command.splitlines()):
        yield f"{'' if place else 'command':<{MARGIN}}{line}"


def speed(answer: ServingAnswer) -> Iterator[str]:
    """Of one request, with few tokens behind it and with its whole context."""
    label, found = f"{'speed':<{MARGIN}}", answer.speed
    if found is None:
        if answer.untimed:
            yield f"{label}not known: {answer.untimed}"
        return
    likely = f"likely {rate(found.low)} to {rate(found.high)}"
    line = f"{label}{rate(found.tokens_per_second)} tokens/s for one request ({likely})"
    if found.longest > found.depth:
        line += f", {rate(found.at_longest)} behind {found.longest:,} tokens"
    if found.host_bandwidth:
        line += f"; the CPU reads {found.host_bandwidth / 1e9:.3g} GB/s"
        line += " (assumed: `--host-bandwidth`)" if found.host_assumed else ""
    yield line
    yield from prompt(found)


def prompt(found: Speed) -> Iterator[str]:
    """How fast a prompt is read, and how long until the first token."""
    label, one = f"{'prompt':<{MARGIN}}", found.prompt
    if one is None:
        if found.prompt_untimed:
            yield f"{label}speed not known: {found.prompt_untimed}"
        return
    line = f"{label}{rate(one.tokens_per_second)} tokens/s (likely {rate(one.low)} to "
    line += f"{rate(one.high)}): {duration(one.seconds)} for {one.tokens:,} tokens"
    if one.longest > one.tokens:
        line += f", {duration(one.seconds_longest)} for {one.longest:,}"
    yield line


def rate(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.3g}"


def pools(answer: ServingAnswer) -> Iterator[str]:
    """What fills each device, with a bar."""
    places = list(dict.fromkeys(pool.where for pool in answer.pools if pool.bytes))
    for place in places:
        shown = [pool for pool in answer.pools if pool.where == place and pool.bytes]
        total = answer.on(place)
        yield "what fills it" if place == "gpu" else f"on {place}"
        name_width = max(len(pool.name) for pool in shown)
        for pool in shown:
            yield f"  {pool.name:<{name_width}}  {gib(pool.bytes):>7} GiB  {pool_bar(pool, total)}"
        yield f"  {'= total':<{name_width}}  {gib(total):>7} GiB"


def pool_bar(pool: Pool, total: int) -> str:
    if not pool.counted:
        return "for a while, inside the budget"
    return "█" * max(1, round(BAR * pool.bytes / total)) if total and pool.bytes > 0 else ""


def working(answer: ServingAnswer) -> Iterator[str]:
    for pool in answer.pools:
        if pool.how:
            yield f"{pool.name}: {pool.how} = {pool.bytes / GIB:.4f} GiB"
            if pool.cite:
                yield f"  {pool.cite}"


def log_lines(answer: ServingAnswer) -> Iterator[str]:
    if answer.log:
        yield f"{answer.title} will print"
        yield from (f"  {line}" for line in answer.log)


def remarks(answer: ServingAnswer) -> Iterator[str]:
    for problem in answer.problems:
        yield f"{problem.level}: {problem.message}" + (f" ({problem.hint})" if problem.hint else "")


def folded(line: str, width: int) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [line]
