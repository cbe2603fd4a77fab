"""Speed of one request: a token reads every weight that it uses and the cache behind it, and
each operation of the graph costs its launch.

Constants were solved from published runs of half of the sources in
`truth/data/llama_speed.jsonl.gz`, by `tools/llama_speed.py`; the other half judges them
(docs/speed.md). Left out: sampling, several requests at once, speculation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, NamedTuple

from memfit.constants import assumed, counted, fitted, measured
from memfit.hardware import GPU
from memfit.hardware.apple import gpu_cores
from memfit.lazy_dataclass import dataclass
from memfit.serving.llamacpp import graphs
from memfit.serving.llamacpp.builder import Builder, Places
from memfit.serving.llamacpp.caches import layer_caches, window_cells
from memfit.serving.llamacpp.ggml import VIEWS
from memfit.serving.llamacpp.model import GgufModel, GgufTensor
from memfit.serving.llamacpp.placement import EXPERTS, INPUTS, Machine
from memfit.serving.llamacpp.settings import Settings

SOURCES = "truth/data/llama_speed.jsonl.gz, sources of the fitted half; tools/llama_speed.py"


class Reader(NamedTuple):
    """How fast a backend reads: shares of the bandwidth for weights of 16 and 32 bits, for packed
    ones and for the cache (with and without flash attention); bytes that a multiprocessor reads in
    a clock, for 16 and 32 bits, for blocks of 32 numbers and for the larger blocks of K- and
    I-quants, which take more arithmetic; seconds of an operation that is launched by itself, with
    the whole graph at once, and so by builds that run several operations as one kernel."""

    half: float
    packed: float
    cache: float
    cache_plain: float
    half_clock: float
    packed_clock: float
    large_clock: float
    single: float
    graphed: float
    fused: float


READERS: Annotated[
    Mapping[str, Reader],
    fitted("rates of reading weights and cache, and the time of a launch, by backend", SOURCES),
] = {
    "CUDA": Reader(0.964, 0.97, 0.97, 0.458, 6.44, 6.13, 6.79, 3.68e-6, 3.86e-6, 2.06e-6),
    "MTL": Reader(0.97, 0.886, 0.97, 0.119, 10.4, 18.5, 7.17, 5.31e-6, 5.31e-6, 4.37e-6),
}
LIKELY: Annotated[
    Mapping[str, tuple[float, float]],
    measured(
        "measured speed over predicted speed: the range of 90 % of the figures of held-out sources",
        "truth/data/llama_speed.jsonl.gz; tests/core/test_llama_speed.py",
    ),
] = {"CUDA": (0.84, 1.131), "MTL": (0.798, 1.093)}
# GPUs whose memory reaches clearly less than its data sheet says, for any kernel.
READ: Annotated[
    Mapping[str, float],
    measured(
        "bytes per second that a kernel which only reads reaches",
        "antirez/ds4#773: 231 to 234 GB/s on a DGX Spark",
    ),
] = {"gb10": 232.5e9}
# What the CPU reads of its memory while it computes layers or experts.
HOST_READS: Annotated[
    float,
    assumed(
        "bytes per second that the CPU reads, where nobody says",
        "46 GB/s on an i9-10900X with four channels of DDR4, 24.5 on an i7-8700 with two of "
        "DDR4-2400 (sources of the fitted half, solved by tools/llama_speed.py)",
    ),
] = 46e9
HOSTS_READ: Annotated[
    tuple[float, float],
    assumed(
        "the least and the most bytes per second that CPUs of desktops read",
        "the least: that i7-8700; the most: nine tenths of two channels of DDR5-5600",
    ),
] = (24.5e9, 80e9)
TURN: Annotated[
    float,
    fitted("seconds of a change from the GPU to the CPU and back", SOURCES),
] = 140e-6
CORES: Annotated[
    Mapping[int, int],
    counted(
        "multiply-adds of 32 bits in a multiprocessor's clock, by compute capability",
        "NVIDIA CUDA C++ programming guide, throughput of native arithmetic instructions",
    ),
] = {60: 64, 70: 64, 72: 64, 75: 64, 80: 64}
CORES_ELSE = 128
GRAPHS: Annotated[
    int,
    counted("build with CUDA graphs on Ampere and newer GPUs", "pull request 6766, 2024-05-08"),
] = 2824
FUSED: Annotated[
    int,
    counted(
        "build from which one kernel runs several operations of a norm, a sum or a router",
        "pull request 15631 and those that followed, from August 2025 on",
    ),
] = 6325
GRAPHS_TURING: Annotated[
    int,
    assumed(
        "build with CUDA graphs on Volta and Turing",
        "pull request 25749 was opened on 2026-07-16; the number is that of the week after",
    ),
] = 10020


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one token takes on one device: bytes of weights in 16 or 32 bits, in blocks of 32
    numbers and in larger blocks, bytes of the cache, and operations."""

    half: float = 0.0
    packed: float = 0.0
    large: float = 0.0
    cache: float = 0.0
    nodes: float = 0.0

    @property
    def bytes(self) -> float:
        return self.half + self.packed + self.large + self.cache


KINDS: Mapping[int, str] = {1: "half", 32: "packed"}  # by the numbers of a block


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """One model in one placement: the work of a token behind `depth` others."""

    model: GgufModel
    settings: Settings
    places: Places

    @cached_property
    def weights(self) -> Mapping[tuple[str, str], float]:
        """Bytes by device and kind, which are the same at every depth."""
        found: dict[tuple[str, str], float] = {}
        for tensor, device, read in weights_read(self.model, self.places):
            key = device, KINDS.get(tensor.type.block, "large")
            found[key] = found.get(key, 0.0) + read
        return found

    def work(self, depth: float) -> dict[str, Work]:
        """By device."""
        found: dict[str, dict[str, float]] = {}

        def add(device: str, part: str, amount: float) -> None:
            parts = found.setdefault(device, {})
            parts[part] = parts.get(part, 0.0) + amount

        for (device, part), read in self.weights.items():
            add(device, part, read)
        nodes = layer_nodes(self.model, self.settings)
        for layer, read in enumerate(cache_reads(self.model, self.settings, depth)):
            add(self.places.caches[layer], "cache", read)
            add(self.places.layers[layer], "nodes", nodes[layer])
        add(self.places.output, "nodes", nodes[-1])
        return {device: Work(**parts) for device, parts in found.items()}


def weights_read(model: GgufModel, places: Places) -> list[tuple[GgufTensor, str, float]]:
    """Each tensor with its device and the bytes that one token reads of it: of routed experts those
    that are active, of the tables of inputs one row, which is left out."""
    experts = model.number("expert_count")
    active = model.number("expert_used_count") / experts if experts else 1.0
    tied = "output.weight" not in model.by_name
    found: list[tuple[GgufTensor, str, float]] = []
    for tensor in model.tensors:
        if tensor.layer >= model.layers:
            continue  # layers that predict further tokens are not loaded
        device = places.tensors[tensor.name]
        if tensor.layer < 0 and tensor.name.startswith(INPUTS):
            if tensor.name != "token_embd.weight" or not tied:
                continue
            device = places.output
        share = active if EXPERTS.search(tensor.name) else 1.0
        found.append((tensor, device, share * tensor.bytes))
    return found


def cache_reads(model: GgufModel, settings: Settings, depth: float) -> list[float]:
    """Bytes of keys and values that each layer reads for one token; a state is read and written."""
    one = replace(settings, context=256, parallel=1, unified=False, draft=None)
    caches = layer_caches(model, one)
    sizes = {True: window_cells(model, one), False: one.cells}
    found = []
    for layer, held in enumerate(caches):
        if held.state:
            found.append(2.0 * held.state)
            continue
        source = model.cache_of(layer)
        slides = model.slides(source)
        seen = min(depth, model.window) if slides else depth
        found.append(caches[source].kv / sizes[slides] * seen if sizes[slides] else 0.0)
    return found


def layer_nodes(model: GgufModel, settings: Settings) -> list[float]:
    """Operations of each layer for one token and, last, of what is around the layers. Layers alike
    have as many, so graphs of one or two of each kind are enough; a kind of which there is one is
    counted with what is around."""
    kinds = [layer_kind(model, layer) for layer in range(model.layers)]
    key = ("nodes", settings.build, settings.flash)

    def counts() -> tuple[dict[object, float], float]:
        places: dict[object, list[int]] = {}
        for layer, kind in enumerate(kinds):
            places.setdefault(kind, []).append(layer)
        order = sorted(found[0] for found in places.values())
        once = operations(model, settings, order)
        each = {
            kind: float(operations(model, settings, sorted([*order, found[1]])) - once)
            if found[1:]
            else 0.0
            for kind, found in places.items()
        }
        return each, once - sum(each.values())

    each, around = model.once(key, counts)
    return [*(each[kind] for kind in kinds), around]


def layer_kind(model: GgufModel, layer: int) -> object:
    flags = (model.slides(layer), graphs.rotates(model, layer), model.cache_of(layer) != layer)
    return (model.heads(layer), model.kv_heads(layer), *flags, model.shapes.get(layer, ()))


def operations(model: GgufModel, settings: Settings, order: list[int]) -> int:
    """Operations of a graph with these layers, for one token, on one device."""
    one = replace(settings, context=512, parallel=1, unified=False, batch=1, ubatch=1, draft=None)
    home = "GPU"
    places = Places(
        tensors={tensor.name: home for tensor in model.tensors},
        layers=(home,) * model.layers,
        caches=(home,) * model.layers,
        output=home,
    )
    builder = Builder(model, one, places, window_cells(model, one), order)
    graphs.build(builder)
    return sum(node.op not in VIEWS for node in builder.graph.nodes)


def gpu_seconds(work: Work, gpu: GPU, reader: Reader, *, flash: bool, build: int) -> float:
    """Seconds of one token's work on a GPU whose bandwidth is known."""
    assert gpu.bandwidth is not None
    most = READ.get(gpu.id, gpu.bandwidth)
    clocks = multiprocessor_clocks(gpu)

    def rate(share: float, in_clock: float) -> float:
        found = min(most, gpu.bandwidth * share) if gpu.bandwidth else most
        limit = clocks * in_clock
        return (found**-SOFT + limit**-SOFT) ** (-1 / SOFT) if limit else found

    cached = min(most, gpu.bandwidth * (reader.cache if flash else reader.cache_plain))
    return (
        work.half / rate(reader.half, reader.half_clock)
        + work.packed / rate(reader.packed, reader.packed_clock)
        + work.large / rate(reader.packed, reader.large_clock)
        + work.cache / cached
        + work.nodes * launch(gpu, reader, build)
    )


def launch(gpu: GPU, reader: Reader, build: int) -> float:
    """Seconds of an operation's launch."""
    if not launches_graphs(gpu, build):
        return reader.single
    return reader.fused if build >= FUSED else reader.graphed


# Two limits of a kernel join smoothly: at their crossing it reaches 84 % of either.
SOFT: Annotated[int, assumed("exponent that joins two limits of a kernel", "no source")] = 4


def multiprocessor_clocks(gpu: GPU) -> float:
    """Clocks a second of all multiprocessors together; 0 where they are not known. Of Apple's
    cores, nanoseconds count instead, and those since M3 have no limit that shows."""
    if cores := gpu_cores(gpu):
        return cores * 1e9
    if gpu.sm is None or "fp32" not in gpu.rates:
        return 0.0
    major, minor = gpu.sm
    return gpu.rates["fp32"] / 2 / CORES.get(10 * major + minor, CORES_ELSE)


def launches_graphs(gpu: GPU, build: int) -> bool:
    """Whether a graph is launched as one: CUDA graphs, from compute capability 8.0 on, or 7.0."""
    if gpu.sm is None:
        return True
    return build >= (GRAPHS if gpu.sm >= (8, 0) else GRAPHS_TURING) and gpu.sm >= (7, 0)


def token_seconds(
    decoding: Decoding,
    machine: Machine,
    gpus: Sequence[GPU],
    depth: float,
    host: float = HOST_READS,
) -> float | str:
    """Seconds of one token behind `depth` others, one device after the other; or why they are not
    known. `host`: bytes per second that the CPU reads."""
    backend = machine.backend.name
    reader = READERS.get(backend)
    if reader is None:
        return f"memfit has no published speeds with {backend} to judge by"
    total = 0.0
    for device, work in decoding.work(depth).items():
        if not work.bytes:
            continue
        if device not in machine.devices:
            if backend not in SHARING:
                return "part of the model runs on the CPU"
            total += work.bytes / host
            continue
        gpu = gpus[machine.devices.index(device)]
        if gpu.bandwidth is None:
            return f"the memory bandwidth of {gpu.name} is not known"
        settings = decoding.settings
        total += gpu_seconds(work, gpu, reader, flash=settings.flash, build=settings.build)
    return total + turns(decoding.model, decoding.places, machine) * TURN


SHARING: Annotated[
    tuple[str, ...], counted("backends with fitted figures of layers on the CPU", SOURCES)
] = ("CUDA",)


def on_cpu(model: GgufModel, places: Places, machine: Machine) -> bool:
    """Whether the CPU computes a layer or its experts."""
    experts = (places.tensors[name] for name, _ in routed(model))
    return any(device not in machine.devices for device in (*places.layers, *experts))


def routed(model: GgufModel) -> list[tuple[str, int]]:
    """Names and layers of experts' matrices."""
    return model.once(
        "routed",
        lambda: [(one.name, one.layer) for one in model.tensors if EXPERTS.search(one.name)],
    )


def turns(model: GgufModel, places: Places, machine: Machine) -> float:
    """How often a token goes from the GPUs to the CPU and back."""
    experts = {layer: places.tensors[name] for name, layer in routed(model)}
    order: list[str] = []
    for layer, device in enumerate(places.layers):
        order += [device, experts.get(layer, device), device]
    held = [device in machine.devices for device in (*order, places.output)]
    return sum(a != b for a, b in pairwise(held)) / 2


__all__ = [
    "HOST_READS",
    "HOSTS_READ",
    "LIKELY",
    "READERS",
    "Decoding",
    "Reader",
    "Work",
    "gpu_seconds",
    "on_cpu",
    "token_seconds",
    "turns",
]
