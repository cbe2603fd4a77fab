"""Speed of reading a prompt: products of matrices by the kernels' rate of arithmetic, attention,
and the results of operations that go through memory.

Constants were solved from published runs of half of the sources in
`truth/data/llama_speed.jsonl.gz`, by `tools/llama_speed.py`; the other half judges them
(docs/speed.md). A prompt is read in micro-batches; the last counts by its share of tokens. Left
out: several GPUs, several prompts at once, images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, NamedTuple

from memfit.constants import assumed, counted, fitted, measured
from memfit.hardware import GPU
from memfit.hardware.apple import all_cores, gpu_cores
from memfit.lazy_dataclass import dataclass
from memfit.serving.llamacpp import graphs, speed
from memfit.serving.llamacpp.builder import Builder, Places
from memfit.serving.llamacpp.caches import window_cells
from memfit.serving.llamacpp.ggml import VIEWS, Tensor
from memfit.serving.llamacpp.model import GgufModel
from memfit.serving.llamacpp.placement import Machine
from memfit.serving.llamacpp.settings import Settings
from memfit.units import round_up

HOME = "GPU"
CELLS = 256  # cells of the cache in whose multiples a graph sees it


class Prompter(NamedTuple):
    """How fast a backend reads prompts: operations in a clock of a multiprocessor, of products with
    weights of 16 and 32 bits, with packed ones, with packed experts, of attention without and with
    its fused kernel; and how often the memory's bandwidth the results of operations go at, on GPUs
    with a small cache and with a large one. `later`: clocks of Macs' cores since M3, as multiples
    of those before."""

    half: float
    packed: float
    experts: float
    plain: float
    flash: float
    traffic: float
    cached: float
    later: float


PROMPTERS: Annotated[
    Mapping[str, Prompter],
    fitted("rates of reading prompts, by backend", speed.SOURCES),
] = {
    "CUDA": Prompter(864, 712, 250, 140, 244, 1.0, 2.18, 1.0),
    "MTL": Prompter(281, 220, 0, 85.6, 281, 1.0, 1.0, 1.33),
}
LIKELY_PROMPTS: Annotated[
    Mapping[str, tuple[float, float]],
    measured(
        "measured speed over predicted speed: the range of 90 % of the figures of held-out sources",
        "truth/data/llama_speed.jsonl.gz; tests/core/test_llama_prompts.py",
    ),
] = {"CUDA": (0.788, 1.635), "MTL": (0.93, 1.139)}
FIXED: Annotated[
    Mapping[str, tuple[str, ...]],
    assumed(
        "rates that no fitted figure tells: results go once at the bandwidth of the data sheet; on "
        "Macs the fused kernel of attention is as fast as products with weights of 16 bits",
        "no source",
    ),
] = {"CUDA": ("traffic", "later"), "MTL": ("experts", "flash", "traffic", "cached")}
KNOWN: Annotated[
    tuple[tuple[int, int], ...],
    counted(
        "compute capabilities whose kernels of packed weights are among the fitted figures, and "
        "GB10's, which is of the same family",
        speed.SOURCES,
    ),
] = ((7, 5), (8, 6), (8, 9), (12, 0), (12, 1))
LARGE: Annotated[
    tuple[tuple[int, int], ...],
    counted(
        "compute capabilities with second-level caches of tens of MB",
        "NVIDIA's architecture papers",
    ),
] = ((8, 9), (12, 0))
INT8: Annotated[
    int,
    assumed(
        "build from which prompts multiply packed weights as they are",
        "pull request 8075 was merged in June 2024; the number is a later one of that summer",
    ),
] = 3250


@dataclass(frozen=True, kw_only=True)
class PromptWork:
    """Operations on numbers by kind, and bytes, of one token of a prompt."""

    half: float = 0.0
    packed: float = 0.0
    experts: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    weights: float = 0.0
    nodes: float = 0.0

    def plus(self, other: PromptWork, times: float) -> PromptWork:
        mine, more = asdict(self), asdict(other)
        return PromptWork(**{name: mine[name] + times * more[name] for name in mine})


def prompt_work(model: GgufModel, settings: Settings, tokens: int, behind: int) -> PromptWork:
    """What a token takes on average in a prompt of `tokens` with `behind` others before it."""
    batch = max(1, min(settings.ubatch, settings.batch, tokens))
    cells = round_up(int(behind + (tokens + batch) / 2), CELLS)
    caches = (settings.cache_k, settings.cache_v)
    key = ("prompt", settings.build, settings.flash, caches, batch, cells)

    def work() -> PromptWork:
        one = replace(
            settings,
            context=cells,
            parallel=1,
            unified=False,
            ubatch=batch,
            batch=batch,
            draft=None,
        )
        places: dict[object, list[int]] = {}
        for layer in range(model.layers):
            places.setdefault(speed.layer_kind(model, layer), []).append(layer)
        order = sorted(found[0] for found in places.values())
        once = graph_work(model, one, order)
        total = once
        for found in places.values():
            if found[1:]:
                more = graph_work(model, one, sorted([*order, found[1]])).plus(once, -1)
                total = total.plus(more, len(found) - 1)
        return PromptWork().plus(total, 1 / batch)

    return model.once(key, work)


def graph_work(model: GgufModel, settings: Settings, order: list[int]) -> PromptWork:
    """Of a whole graph with these layers."""
    home = Places(
        tensors={tensor.name: HOME for tensor in model.tensors},
        layers=(HOME,) * model.layers,
        caches=(HOME,) * model.layers,
        output=HOME,
    )
    builder = Builder(model, settings, home, window_cells(model, settings), order)
    graphs.build(builder)
    chosen = model.number("expert_used_count") / max(1, model.number("expert_count"))
    missed = (1 - chosen) ** builder.n  # of the experts, by no token
    parts = dict.fromkeys(asdict(PromptWork()), 0.0)
    for node in builder.graph.nodes:
        if node.op in VIEWS:
            continue
        parts["nodes"] += 1
        if node.op in ("mul_mat", "mul_mat_id"):
            weight, x = node.src[:2]
            routed = node.op == "mul_mat_id"
            parts[_kind(weight, routed=routed)] += 2.0 * weight.ne[0] * node.count
            parts["moved"] += size(node) + size(x)
            if weight.weight:
                parts["weights"] += size(weight) * (1 - missed if routed else 1)
        elif node.op == "flash_attn":
            q, keys, values = node.src[:3]
            each = q.ne[0] + values.ne[0]
            parts["attention"] += 2.0 * q.ne[1] * q.ne[2] * each * keys.ne[1]
        elif node.op in ("set_rows", "get_rows"):
            parts["moved"] += 2.0 * size(node if node.op == "get_rows" else node.src[0])
        else:
            parts["moved"] += size(node) + sum(map(size, node.src))
    return PromptWork(**parts)


def _kind(weight: Tensor, *, routed: bool) -> str:
    if not weight.weight:
        return "attention"
    if weight.kind.block == 1:
        return "half"
    return "experts" if routed else "packed"


def size(tensor: Tensor) -> float:
    return tensor.count * tensor.kind.bytes / tensor.kind.block


def prompt_rate(
    model: GgufModel,
    settings: Settings,
    machine: Machine,
    gpus: tuple[GPU, ...],
    tokens: int,
    behind: int = 0,
) -> float | str:
    """Tokens per second of a prompt on a GPU that holds the whole model, or why it is not known."""
    backend, gpu = machine.backend.name, gpus[0]
    prompter = PROMPTERS.get(backend)
    if prompter is None or gpu.bandwidth is None:
        return f"memfit has no published speeds with {backend} to judge by"
    if len(machine.devices) > 1:
        return "prompts on several GPUs are not known"
    work = prompt_work(model, settings, tokens, behind)
    if why := unknown(work, gpu, settings, prompter):
        return why
    return 1 / prompt_seconds(work, gpu, prompter, flash=settings.flash, build=settings.build)


def unknown(work: PromptWork, gpu: GPU, settings: Settings, prompter: Prompter) -> str:
    """Why the speed of prompts is not known, or nothing."""
    if not clocks(gpu, prompter):
        return f"memfit has no published speeds of prompts on GPUs like {gpu.name} to judge by"
    if work.experts and not prompter.experts:
        return "memfit has no published speeds of prompts of mixtures with Metal to judge by"
    if gpu.sm is not None and settings.build < INT8 and work.packed:
        return "builds before kernels of packed weights read prompts in another way"
    return ""


def clocks(gpu: GPU, prompter: Prompter) -> float:
    """Clocks a second of all multiprocessors; nanoseconds of all cores of a Mac, times its share; 0
    where no figure tells."""
    if gpu.vendor == "apple":
        return all_cores(gpu) * 1e9 * (1 if gpu_cores(gpu) else prompter.later)
    return speed.multiprocessor_clocks(gpu) if gpu.sm in KNOWN else 0.0


def prompt_seconds(
    work: PromptWork, gpu: GPU, prompter: Prompter, *, flash: bool, build: int
) -> float:
    """Seconds of one token's share of a prompt."""
    assert gpu.bandwidth is not None
    most = speed.READ.get(gpu.id, gpu.bandwidth)
    traffic = prompter.cached if gpu.sm in LARGE else prompter.traffic
    arithmetic = (
        work.half / prompter.half
        + work.packed / prompter.packed
        + (work.experts / prompter.experts if work.experts else 0)
        + work.attention / (prompter.flash if flash else prompter.plain)
    )
    backend = "MTL" if gpu.vendor == "apple" else "CUDA"
    launches = work.nodes * speed.launch(gpu, speed.READERS[backend], build)
    return (
        arithmetic / clocks(gpu, prompter)
        + work.moved / (traffic * most)
        + work.weights / most
        + launches
    )


__all__ = [
    "LIKELY_PROMPTS",
    "PROMPTERS",
    "PromptWork",
    "Prompter",
    "prompt_rate",
    "prompt_seconds",
    "prompt_work",
]
