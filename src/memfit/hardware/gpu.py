"""Accelerators: rows of gpus.toml, found by any of their names. A number that is not there is
unknown, never guessed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from typing import Annotated, Any

from memfit.constants import vendor
from memfit.errors import InputError, Problem
from memfit.hardware.link import Link, links
from memfit.hardware.tables import columns, figure, span, table
from memfit.lazy_dataclass import dataclass
from memfit.registry import ALIKE, nearest
from memfit.units import GIB, LARGEST

OLDEST: Annotated[
    tuple[int, int],
    vendor("compute capability that builds of PyTorch know", "pytorch/pytorch#158700, CUDA 12.8"),
] = (7, 0)
MATHS = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")
BY_MEMORY = "for any other card give its memory: `--memory 24GiB`"
BY_LAPTOP = (
    "a laptop GPU often has less memory than the card of the same number; "
    "give its own: `--memory 16GiB`"
)
# Words that say nothing: `NVIDIA GeForce RTX 4090`, `RTX 4090` and `rtx4090` are one card.
_NOISE = {"", "nvidia", "geforce", "tesla", "amd", "instinct", "intel", "r", "tm", "generation"} | {
    *("gpu", "graphics", "with", "design", "vram", "ram", "unified", "memory")
}
# `RTX 4090 Mobile`, `4090m` and `RTX 2080 with Max-Q Design` are parts for laptops.
_LAPTOP = re.compile(r"laptop|mobile|notebook|max[ _-]?q\b|(?<=\d{4})m\b|(?<=\d{4}ti)m\b")
_AMOUNT = re.compile(r"(?<=\d)[ _-]*gi?b?\b")  # `80G`, `80 GB`


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class GPU:
    """One device as CUDA (ROCm, …) shows it: bytes, bytes/s, dense flop/s. None, or a missing rate:
    unknown.

    `memory` is the lowest total in `memory_range`, for the total drifts with the driver; `held` is
    what others keep of it. `status` and `cites` say for each field how it is known (log, repo,
    derived, label) and from where.
    """

    id: str
    name: str
    vendor: str = "unknown"
    memory: int
    memory_range: tuple[int, int]
    held: int = 0
    free: int | None = None  # only from `auto`: what the driver had free
    smi: int | None = None  # the total that nvidia-smi shows
    label: int | None = None  # GiB on the box
    bandwidth: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict, hash=False)
    arch: str | None = None  # `sm_89`, `gfx942`
    sm: tuple[int, int] | None = None
    sms: int | None = None
    l2: int | None = None
    power: int | None = None  # watts, the board's limit
    link: Link | None = None
    bridge: Link | None = None  # optional, between pairs of cards
    form: str | None = None  # sxm, pcie, oam, superchip, unified, laptop
    aliases: tuple[str, ...] = ()
    status: Mapping[str, str] = field(default_factory=dict, hash=False)
    cites: Mapping[str, str] = field(default_factory=dict, hash=False)
    note: str = ""

    def __repr__(self) -> str:
        return f"<GPU {self.id}: {self.name}>"

    @property
    def half(self) -> str:
        """The 16-bit numbers that it multiplies best in: NVIDIA's know bf16 from compute capability
        8.0 on."""
        return "bf16" if self.sm is None or self.sm >= (8, 0) else "fp16"

    @property
    def unchecked(self) -> tuple[str, ...]:
        """The fields that nothing substantiates."""
        return tuple(key for key, status in self.status.items() if status == "label")


def _arch(text: str) -> tuple[str, tuple[int, int] | None]:
    if "." not in text:
        return text, None
    major, minor = text.split(".")
    return f"sm_{major}{minor}", (int(major), int(minor))


@cache
def _gpu(name: str) -> GPU:
    """The row called `name`, exactly."""
    row: Mapping[str, Any] = table("gpus")[name]
    sources: Mapping[str, str] = table("gpus")["sources"]
    low, high, known, cite = span(row["memory"])
    figures = {
        key: figure(row[key], sources)
        for key in (
            "label",
            "smi",
            "held",
            "bandwidth",
            *MATHS,
            "arch",
            "sms",
            "l2",
            "power",
            "link",
            "bridge",
        )
        if key in row
    }

    def whole(key: str) -> int | None:
        return int(figures[key].value) if key in figures else None

    arch, sm = _arch(figures["arch"].value) if "arch" in figures else (None, None)
    return GPU(
        id=name,
        name=row["name"],
        vendor=row["vendor"],
        memory=low,
        memory_range=(low, high),
        held=whole("held") or 0,
        smi=whole("smi"),
        label=whole("label"),
        bandwidth=float(figures["bandwidth"].value) if "bandwidth" in figures else None,
        rates={math: float(figures[math].value) for math in MATHS if math in figures},
        arch=arch,
        sm=sm,
        sms=whole("sms"),
        l2=whole("l2"),
        power=whole("power"),
        link=links()[figures["link"].value] if "link" in figures else None,
        bridge=links()[figures["bridge"].value] if "bridge" in figures else None,
        form=row["form"],
        aliases=tuple(row.get("aliases", ())),
        status={"memory": known} | {key: one.status for key, one in figures.items()},
        cites={"memory": cite} | {key: one.cite for key, one in figures.items()},
        note=row.get("note", ""),
    )


def plain(name: str) -> str:
    """The name without case, separators and words that say nothing; that it is for laptops, and
    then its memory (`80G` is `80GB`), come last."""
    text = _LAPTOP.sub(" laptop ", _AMOUNT.sub("gb ", name[:200].lower()))
    words = [word for word in re.split(r"[^a-z0-9]+", text) if word not in _NOISE]
    amounts = [word for word in words if re.fullmatch(r"\d+gb", word)]
    last = ["laptop"] * ("laptop" in words) + amounts
    return "".join([word for word in words if word not in last] + last)


@cache
def _names() -> dict[str, tuple[str, ...]]:
    """Plain name -> the rows it may mean; a `shared` name belongs to no single one of them, even
    where only one is known."""
    owners: dict[str, list[str]] = {}
    shared: dict[str, list[str]] = {}
    for key, row in columns("gpus", "name", "aliases", "shared").items():
        common = dict.fromkeys(map(plain, row.get("shared", ())))
        for name in common:
            shared.setdefault(name, []).append(key)
        for name in dict.fromkeys(map(plain, (key, row["name"], *row.get("aliases", ())))):
            if name not in common:
                owners.setdefault(name, []).append(key)
    for name, keys in owners.items():
        if len(keys) > 1 or name in shared:
            raise ValueError(f"gpus.toml: `{name}` names {', '.join(keys)}")
    return {name: tuple(keys) for name, keys in owners.items()} | {
        name: (*keys, "") for name, keys in shared.items()
    }


def all_gpus() -> tuple[GPU, ...]:
    """Every row, in the order of the table: by vendor and use, then by age."""
    return tuple(_gpu(key) for key in table("gpus") if key != "sources")


@cache
def _meant(name: str) -> tuple[str, tuple[str, ...]]:
    """The plain name of the table that `name` is short for, and the rows it may mean: `4090s` are
    RTX 4090, and memory tells apart the cards that share a name."""
    names, text = _names(), plain(name)
    for one in dict.fromkeys((text, text.removesuffix("s"))):
        for full in (one, f"rtx{one}", f"gtx{one}"):
            if full in names:
                return full, names[full]
            for cut in range(3, 6) if full.endswith("gb") else ():
                rest, amount = full[:-cut], full[-cut:-2]
                keys = tuple(key for key in names.get(rest, ()) if key and _label(key) == amount)
                if keys:
                    return rest, keys
    return text, ()


def _label(key: str) -> str:
    return str(table("gpus")[key]["label"].split(" ")[0])


def nvidia_cards() -> list[GPU]:
    """NVIDIA's GPUs to recommend: no part of a laptop, none without kernels in today's PyTorch."""
    some = (gpu for gpu in all_gpus() if gpu.vendor == "nvidia" and gpu.form != "laptop")
    return [gpu for gpu in some if gpu.sm is None or gpu.sm >= OLDEST]


def apple_gpus() -> list[GPU]:
    return [gpu for gpu in all_gpus() if gpu.vendor == "apple"]


def variants(name: str) -> tuple[GPU, ...]:
    """The GPUs that `name` may mean: none, one, or (`A100`) several."""
    if name in table("gpus") and name != "sources":
        return (_gpu(name),)  # an id: no need to read every name
    return tuple(_gpu(key) for key in _meant(name)[1] if key)


@cache
def _common() -> dict[str, str]:
    """Plain shared name -> the row that it stands for when a person types it."""
    return {
        plain(name): key
        for key, row in columns("gpus", "common").items()
        for name in row.get("common", ())
    }


@cache
def _typed() -> dict[str, str]:
    """Plain shared name -> the name, as people type it."""
    rows = columns("gpus", "common").values()
    return {plain(name): name.lower() for row in rows for name in row.get("common", ())}


def common_gpu(name: str) -> GPU | None:
    """The most common of the GPUs that share `name` (`A100` is the 80 GB SXM board)."""
    if name in table("gpus") and name != "sources":
        return None
    full, keys = _meant(name)
    key = _common().get(full)
    return _gpu(key) if key in keys else None


def gpu_problem(name: str, *, where: str = "gpu") -> Problem | None:
    """What keeps `name` from naming one GPU, or None."""
    if name in table("gpus") and name != "sources":
        return None
    text, keys = _meant(name)
    if not keys and name.strip().isdecimal() and len(name.strip()) < 4:
        message = f"`{name.strip()}` is a number of GPUs, without their name"
        hint = f"write it like `{name.strip()}xh100`"
        return Problem(message=message, where=where, hint=hint)
    if not keys and "laptop" in text:
        return Problem(message=f"unknown GPU `{name[:80]}`", where=where, hint=BY_LAPTOP)
    if not keys and (hint := other_size(name)):
        return Problem(message=f"unknown GPU `{name[:80]}`", where=where, hint=hint)
    if not keys:
        like = f"rtx{text}" if text[:4].isdecimal() else text
        close = dict.fromkeys(
            key
            for near in nearest(like, _names(), 6, cutoff=ALIKE)
            for key in (_typed().get(near), *_names()[near])
            if key
        )
        offer = (
            "did you mean " + ", ".join(f"`{key}`" for key in list(close)[:3]) + "? "
            if close
            else ""
        )
        return Problem(
            message=f"unknown GPU `{name[:80]}`",
            where=where,
            hint=offer + BY_MEMORY,
            fix=(name, next(iter(close))) if close else None,
        )
    found = variants(name)
    listed = ", ".join(f"`{gpu.id}`" for gpu in found)
    if len(keys) == 1:
        return None
    if len(found) == 1:
        return Problem(
            message=f"`{name[:80]}` comes in several memory sizes",
            where=where,
            hint=f"name the size, like {listed}; {BY_MEMORY}",
            fix=(name, found[0].id),
        )
    return Problem(
        message=f"`{name[:80]}` names {len(found)} GPUs",
        where=where,
        hint=f"name one of {listed}",
    )


def other_size(name: str) -> str:
    """What to say of a known GPU with a memory that no row has (`h100-64gb`); empty for others."""
    found = re.fullmatch(r"(.+?)[\s_-]*([1-9]\d{0,3})[\s_-]*gi?b", name.strip().lower())
    listed = variants(found[1]) if found else ()
    if found is None or not listed:
        return ""
    gpu = common_gpu(found[1]) or listed[0]
    sizes = " and ".join(sorted({_label(one.id) for one in listed}, key=float))
    return (
        f"`{found[1][:40]}` is listed with {sizes} GB; another size: "
        f"`--gpu {gpu.id} --memory {found[2]}GiB`"
    )


def find_gpu(name: str, *, where: str = "gpu") -> GPU:
    """By id, marketing name, alias or device name (`NVIDIA GeForce RTX 4090`), whatever the case
    and separators.

    A name that several cards share (`A100`, `RTX 3080`) is refused with all of them listed: a
    measurement must name its card. What people type goes through `parse_cluster`, which takes the
    most common one.
    """
    problem = gpu_problem(name, where=where)
    if problem:
        raise InputError(problem)
    return variants(name)[0]


def custom_gpu(memory: int, *, where: str = "memory") -> GPU:
    """A device of which only the usable memory is known: exactly `memory` bytes."""
    if not 0 < memory <= LARGEST:
        raise InputError.one(
            f"`{memory}` bytes is not a valid GPU memory",
            where=where,
            hint="must be more than 0 and at most 1024 PiB",
        )
    told = {"memory": "given by the user"}
    return GPU(
        id="custom",
        name=f"GPU with {memory / GIB:.3g} GiB",
        memory=memory,
        memory_range=(memory, memory),
        status={"memory": "given"},
        cites=told,
    )
