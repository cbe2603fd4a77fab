"""Layouts as people write them: `fsdp=8`, `zero=8,stage=3`, in the flag `--use` and the key `use`
of a job file; read, and written again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

from memfit.errors import Problem, raise_errors
from memfit.option_values import field_problems, from_text, unknown
from memfit.strategy import DDP, EP, LAYOUTS, Layout, Strategy


def strategy_from(words: Iterable[str], gpus: int | None) -> Strategy:
    """`fsdp=8`, `tp=2`, `zero=8,stage=3`: layouts over `gpus` ranks in all (None: as many as they
    say). One layout without a size takes what the others leave; where nothing but `tp`, `cp`, `pp`,
    `ep` is named, the rest are replicas (`ddp`), as launchers would have it."""
    problems: list[Problem] = []
    found: dict[str, Any] = {}
    for word in separate(map(plain, words)):
        name = word.partition("=")[0].partition(",")[0].strip().lower()
        if name not in LAYOUTS:
            problems.append(unknown("layout", name, "use", tuple(LAYOUTS)))
        elif name in found:
            problems.append(
                Problem(
                    message=f"`{name}` is given twice",
                    where="use",
                    hint="give each layout once",
                )
            )
        else:
            found[name] = layout_from(name, word, problems)
    raise_errors(problems)
    strategy = filled(Strategy(**found), gpus, problems)
    raise_errors(problems)
    return strategy


# `zero3`, `zero-3=8`, `fsdp2`: as people call them.
NUMBERED = re.compile(r"(?:(zero)[-_]?([123])|(fsdp)[-_]?([12]))(=\d+)?((?:,.*)?)", re.IGNORECASE)


def plain(word: str) -> str:
    """`zero3=8` is `zero=8,stage=3`, and `fsdp1` is `fsdp,version=1`."""
    found = NUMBERED.fullmatch(word.strip())
    if found is None:
        return word
    zero, stage, _, version, size, rest = found.groups()
    name, setting = ("zero", f"stage={stage}") if zero else ("fsdp", f"version={version}")
    return f"{name}{size or ''},{setting}{rest}"


# Layouts by their whole names.
WHOLE = {
    "tensor": "tp",
    "context": "cp",
    "pipeline": "pp",
    "expert": "ep",
    "data": "ddp",
    "deepspeed": "zero",
}


def separate(words: Iterable[str]) -> Iterator[str]:
    """A word for each layout: `tp=4,pp=2` is two, `zero=8,stage=3` one; `tensor=4` is `tp=4`, but
    not among the settings of a layout that has one of that name (`ep=4,tensor=1`)."""
    for word in words:
        piece = ""
        for part in word.split(","):
            part = part if is_setting(part, piece) else shortened(part)
            begins = part.partition("=")[0].strip().lower() in LAYOUTS
            if begins and piece:
                yield piece
                piece = ""
            piece = f"{piece},{part}" if piece else part
        yield piece


def is_setting(part: str, piece: str) -> bool:
    """Whether the layout that a piece begins with has a setting of this name."""
    kind = LAYOUTS.get(re.split("[=,]", piece)[0].strip().lower())
    name = part.partition("=")[0].strip()
    return kind is not None and name in {one.name for one in dataclasses.fields(kind)}


def shortened(part: str) -> str:
    """`tensor_parallel=4` as `tp=4`."""
    name, equals, size = part.partition("=")
    known = WHOLE.get(re.sub(r"[-_ ]?parallel$", "", name.strip().lower()))
    return part if known is None else f"{known}{equals}{size}"


def layout_from(name: str, word: str, problems: list[Problem]) -> Layout:
    """`zero=8,stage=3`; `zero,stage=3` leaves the size open."""
    kind = LAYOUTS[name]
    fields = {one.name: one for one in dataclasses.fields(kind)}
    good: dict[str, Any] = {}
    first, *rest = word.split(",")
    pairs = [("size", first.partition("=")[2])] if "=" in first else []
    pairs += [
        (
            piece.partition("=")[0].strip().replace("-", "_"),
            piece.partition("=")[2] if "=" in piece else "true",
        )
        for piece in rest
    ]
    for place, (key, text) in enumerate(pairs):
        where = f"use {name}.{key[:40]}"
        if key not in fields:
            problems.append(
                idle(key, where)
                if name == "zero" and key in IDLE
                else unknown("setting", key, where, tuple(fields))
            )
            continue
        if any(key == other for other, _ in pairs[:place]):
            problems.append(
                Problem(
                    message=f"`{key}` is given twice",
                    where=where,
                    hint="give each setting once",
                )
            )
            continue
        value = setting_from(fields[key], text.strip())
        wrong = [
            dataclasses.replace(problem, where=where)
            for problem in field_problems(fields[key], value)
        ]
        if key == "size" and value == 0:
            wrong = [
                Problem(
                    message="a layout must have at least 1 rank",
                    where=where,
                    hint="omit the size to use the remaining GPUs",
                )
            ]
        problems += wrong
        if not wrong:
            good[key] = value
    return kind(**good)


def setting_from(one: dataclasses.Field[Any], text: str) -> Any:
    """A setting's text as its type; a switch with a third choice also takes `true`, `off` …"""
    if "yes" in one.metadata.get("choices", ()):
        switch = from_text(text, "bool")
        return text if isinstance(switch, str) else "yes" if switch else "no"
    return from_text(text, str(one.type))


# Of DeepSpeed's section `activation_checkpointing` (deepspeed 0.19.8
# runtime/activation_checkpointing/config.py).
IDLE = (
    "activation_checkpointing",
    "cpu_checkpointing",
    "partition_activations",
    "contiguous_memory_optimization",
    "number_checkpoints",
)


def idle(key: str, where: str) -> Problem:
    """transformers 5.23, accelerate 1.15, PEFT 0.21 and TRL 1.16 checkpoint with
    torch.utils.checkpoint; none of them calls DeepSpeed's own."""
    message = (
        f"`{key}` has no effect: transformers uses torch's checkpointing, and "
        "only models that call `deepspeed.checkpointing` read that section"
    )
    return Problem(
        message=message,
        where=where,
        hint="use `--checkpointing full`, and `--activation-offload` for CPU memory",
    )


def instead(strategy: Strategy, known: int, gpus: int) -> str:
    """The same layouts with a size of the outer ones that fits: `fsdp=64 tp=8` of 64 GPUs may mean
    `fsdp=8 tp=8`. It is not read so: torchtitan and accelerate refuse it, too."""
    for name in ("ddp", "zero", "gemini", "fsdp", "pp"):
        size = strategy.size(name)
        if size > 1 and gpus % (known // size) == 0:
            sizes = {
                one: gpus // (known // size) if one == name else layout.size
                for one, layout in strategy.uses()
                if layout.size
            }
            return ": " + " ".join(f"`--use {one}={count}`" for one, count in sizes.items())
    return ""


def filled(strategy: Strategy, gpus: int | None, problems: list[Problem]) -> Strategy:
    """Sizes left open are filled; their product must be the number of GPUs."""
    left_open = [name for name, layout in strategy.uses() if layout.size == 0 and name != "ep"]
    known = 1
    for name, layout in strategy.uses():
        known *= layout.size or 1 if name != "ep" else 1
    if len(left_open) > 1:
        message = f"`{left_open[0]}` and `{left_open[1]}` both have no size"
        problems.append(Problem(message=message, where="use", hint="give one of them a size"))
        return strategy
    if gpus is None and left_open:
        message = f"`{left_open[0]}` has no size and there are no GPUs to take it from"
        problems.append(
            Problem(
                message=message,
                where="use",
                hint=f"write `{left_open[0]}=8`, or `--gpu 8xh100-sxm`",
            )
        )
        return strategy
    gpus = known if gpus is None else gpus
    if gpus % known:
        message = f"{known} ranks do not divide {gpus} GPUs"
        problems.append(
            Problem(
                message=message,
                where="use",
                hint=f"the sizes multiply to the number of GPUs{instead(strategy, known, gpus)}",
            )
        )
        return strategy
    rest = gpus // known
    if left_open:
        strategy = dataclasses.replace(
            strategy,
            **{left_open[0]: dataclasses.replace(getattr(strategy, left_open[0]), size=rest)},
        )
    elif rest > 1 and strategy.ddp is None and strategy.zero is None and strategy.gemini is None:
        strategy = dataclasses.replace(strategy, ddp=DDP(size=rest))
    elif rest > 1:
        message = f"the layouts take {known} of {gpus} GPUs"
        problems.append(
            Problem(message=message, where="use", hint="omit one size: that layout takes the rest")
        )
    if strategy.fsdp is not None and strategy.zero is not None:
        problems.append(
            Problem(
                message="FSDP and ZeRO cannot shard the same weights",
                where="use",
                hint="use `fsdp` or `zero`",
            )
        )
    if strategy.ddp is not None and strategy.zero is not None and strategy.ddp.size > 1:
        problems.append(
            Problem(
                message="ZeRO already covers data parallelism",
                where="use",
                hint="use `zero` on all ranks (MiCS is not supported)",
            )
        )
    return strategy if strategy.ep is None or problems else spread(strategy, strategy.ep, problems)


def spread(strategy: Strategy, ep: EP, problems: list[Problem]) -> Strategy:
    """The layout with its size of expert parallelism; by default all ranks of a stage. A size that
    does not divide them is a problem."""
    within, each = strategy.within, strategy.expert_tensor
    if within % (each * max(1, ep.size)):
        message = f"{ep.size or 'no'} ranks of experts" + (
            f" times {each} that share each" if each > 1 else ""
        )
        whole = (
            f", or `ep={ep.size or within},tensor=1` with an expert's matrices whole"
            if each > 1 and not ep.tensor
            else ""
        )
        problems.append(
            Problem(
                message=f"{message} do not divide the {within} ranks of a stage",
                where="use ep",
                hint=f"`ep={within // each}`{whole}",
            )
        )
        return strategy
    return dataclasses.replace(strategy, ep=dataclasses.replace(ep, size=ep.size or within // each))


def uses(strategy: Strategy) -> Iterator[str]:
    """As `--use` reads them."""
    for name, layout in strategy.uses():
        yield ",".join([f"{name}={layout.size}", *settings(layout)])


def settings(layout: Layout) -> Iterator[str]:
    for one in dataclasses.fields(layout):
        value = getattr(layout, one.name)
        if one.name != "size" and value != one.default:
            spelled = one.name.replace("_", "-")
            yield spelled if value is True else f"{spelled}={'no' if value is False else value}"


__all__ = ["strategy_from", "uses"]
