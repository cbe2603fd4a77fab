"""A cluster: nodes of equal GPUs, and the network between them. `8xh100-sxm`, `2x8xA100-80GB`,
`rtx-4090`, `8 h100s`, `4090 x 2`, `p4d.24xlarge`, `2xp5.48xlarge`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated

from memfit.constants import setting, vendor
from memfit.errors import InputError, Problem, raise_errors
from memfit.hardware.apple import apple_gpu, without_memory
from memfit.hardware.gpu import GPU, common_gpu, find_gpu, gpu_problem, variants
from memfit.hardware.link import Link, find_link
from memfit.hardware.machines import find_machine
from memfit.hardware.mig import mig_slice
from memfit.hardware.own import own_gpu
from memfit.hardware.vendors import refusal
from memfit.hardware.vgpu import vgpu
from memfit.lazy_dataclass import dataclass

LARGEST_NODE: Annotated[int, setting("GPUs of a node, above which a number is a typo")] = 1024
MOST_NODES: Annotated[int, setting("nodes, above which a number is a typo")] = 100_000
BOARD: Annotated[
    int,
    vendor("SXM modules of one machine at most", "HGX and DGX, V100 to B300; a DGX-2 alone has 16"),
] = 8
# But `7900xtx` is the name of a card.
_COUNT = re.compile(r"\s*([+-]?[0-9][0-9.,]*)\s*[x×*](?!tx?\b)", re.IGNORECASE)
# `8 h100s`, `dual 3090`; `4090 x 2`. What they count must be a name, and the whole none.
_WORDS = {"single": "1", "dual": "2", "two": "2", "three": "3", "triple": "3", "four": "4"} | {
    "quad": "4",
    "eight": "8",
}
_COUNTED = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?P<count>[0-9]{{1,4}}|{'|'.join(_WORDS)})\s+(?P<name>\S.*)",
        r"(?P<name>.*?\S)\s*[x×*]\s*(?P<count>[0-9]{1,4})",
    )
)
_HINT = "write it like `8xh100-sxm` or, for several nodes, `2x8xh100-sxm`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal nodes of equal GPUs; `network` joins the nodes, `gpu.link` the GPUs of one."""

    gpu: GPU
    gpus_per_node: int = 1
    nodes: int = 1
    network: Link | None = None

    def __post_init__(self) -> None:
        raise_errors(
            problem
            for problem in (
                _count_problem(
                    str(self.gpus_per_node), "GPUs per node", LARGEST_NODE, "cluster.gpus_per_node"
                ),
                _count_problem(str(self.nodes), "nodes", MOST_NODES, "cluster.nodes"),
            )
            if problem
        )

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def name(self) -> str:
        return (
            f"{f'{self.nodes} x ' if self.nodes > 1 else ''}{self.gpus_per_node} x {self.gpu.name}"
        )

    def resized(self, count: int, node: int = BOARD) -> Cluster:
        """`count` GPUs of this kind: on one node, or on full nodes of `node` GPUs."""
        assert count <= node or count % node == 0, (count, node)
        return replace(self, gpus_per_node=min(count, node), nodes=max(1, count // node))


def _count_problem(text: str, what: str, most: int, where: str) -> Problem | None:
    if re.fullmatch(r"[0-9]{1,9}", text) and 1 <= int(text) <= most:
        return None
    return Problem(
        message=f"`{text[:20]}` is not a valid number of {what}",
        where=where,
        hint=f"an integer from 1 to {most}",
    )


def _pick(name: str, per_node: int, where: str) -> GPU | Problem:
    """The GPU called `name`. Of cards that share a name, a node of four or more takes the board
    (SXM) where there is one, and otherwise the most common card."""
    if own := own_gpu(name):
        return own
    whole, _, part = name.partition("/")
    if part:
        found = _pick(whole.strip(), per_node, where)
        return found if isinstance(found, Problem) else mig_slice(found, part, where=where)
    if unsupported := refusal(name, where):
        return unsupported
    if virtual := vgpu(name, where=where):
        return virtual
    problem = gpu_problem(name, where=where)
    if problem is None:
        return refusal(variants(name)[0], where) or variants(name)[0]
    boards = [gpu for gpu in variants(name) if gpu.form == "sxm"]
    if per_node >= 4 and len(boards) == 1:
        return boards[0]
    return common_gpu(name) or apple_gpu(name) or without_memory(name, where) or problem


def _split(text: str) -> tuple[list[str], str]:
    """The counts that `text` begins with, or the one that it ends with, and the rest."""
    counts, at = [], 0
    while match := _COUNT.match(text, at):
        counts.append(match[1])
        at = match.end()
    rest = text[at:].strip()
    for pattern in _COUNTED:
        found = pattern.fullmatch(text.strip())
        if found and _names_some(found["name"]) and not _names_some(rest):
            return [_WORDS.get(found["count"].lower(), found["count"])], found["name"]
    return counts, rest


def _names_some(name: str) -> bool:
    return find_machine(name) is not None or isinstance(_pick(name, 1, ""), GPU)


def parse_cluster(text: str, *, network: str | None = None, where: str = "gpu") -> Cluster:
    """`[nodes x] [GPUs per node x] name`, or `[nodes x] machine`. All problems are raised at once.
    More SXM boards than one machine carries are split into nodes of 8."""
    counts, name = _split(text[:200])
    if not name or len(counts) > 2 or len(text) > 200:
        raise InputError.one(f"`{text[:40]}` does not name a GPU", where=where, hint=_HINT)
    machine = find_machine(name)
    if machine is not None and len(counts) < 2:
        counts, name = [*(counts or ["1"]), str(machine.count)], machine.gpu
    nodes, per_node = ["1", "1", *counts][-2:]
    problems = [
        _count_problem(nodes, "nodes", MOST_NODES, where),
        _count_problem(per_node, "GPUs per node", LARGEST_NODE, where),
    ]
    counted = not any(problems)
    gpu = _pick(name, int(per_node) if counted else 1, where)
    joined: Link | None = None
    if network is not None:
        try:
            joined = find_link(network)
        except InputError as error:
            problems += error.problems
    raise_errors(
        problem for problem in (*problems, gpu if isinstance(gpu, Problem) else None) if problem
    )
    assert isinstance(gpu, GPU)
    each, some = int(per_node), int(nodes)
    if gpu.form == "sxm" and len(counts) < 2 and each > BOARD and each % BOARD == 0:
        each, some = BOARD, each // BOARD
    return Cluster(gpu=gpu, gpus_per_node=each, nodes=some, network=joined)


def assumptions(text: str, *, where: str = "gpu") -> tuple[Problem, ...]:
    """What `parse_cluster` assumed about `text`, as notes for the answer."""
    counts, name = _split(text[:200])
    machine = find_machine(name)
    if machine is not None:
        what = f"`{machine.name}` has {machine.count} x {find_gpu(machine.gpu).name}"
        unchecked = " (not verified)" if machine.status == "label" else ""
        return (Problem(message=what + unchecked, where=where, level="note"),)
    several = variants(name)
    per_node = int(counts[-1]) if counts and counts[-1].isdigit() else 1
    found = _pick(name, per_node, where)
    if len(several) < 2 or not isinstance(found, GPU):
        return ()
    others = ", ".join(f"`{gpu.id}`" for gpu in several if gpu.id != found.id)
    message = f"`{name[:80]}` names {len(several)} GPUs; this answer is for `{found.id}`"
    hint = f"`--gpu` also takes {others}"
    return (Problem(message=message, where=where, hint=hint, level="note"),)
