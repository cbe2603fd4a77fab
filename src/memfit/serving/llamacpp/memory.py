"""The buffers of one run: weights, caches, states, outputs, and compute buffers, on each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from memfit.errors import InputError
from memfit.lazy_dataclass import dataclass
from memfit.serving.llamacpp import graphs
from memfit.serving.llamacpp.builder import Builder, Places
from memfit.serving.llamacpp.caches import LayerCache, layer_caches, window_cells
from memfit.serving.llamacpp.model import GgufModel
from memfit.serving.llamacpp.placement import HOST, Machine, model_buffers, place
from memfit.serving.llamacpp.recipes import RECIPES
from memfit.serving.llamacpp.scheduler import COPIES, Scheduler
from memfit.serving.llamacpp.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Bytes by device; `HOST` is the CPU's memory."""

    model: Mapping[str, int] = field(default_factory=dict)
    kv: Mapping[str, int] = field(default_factory=dict)
    kv_window: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, int] = field(default_factory=dict)
    compute: Mapping[str, int] = field(default_factory=dict)
    draft: Mapping[str, int] = field(default_factory=dict)  # all that a draft model needs
    output: int = 0
    layers: tuple[str, ...] = ()
    pipeline: bool = False
    splits: int = 0

    def on(self, device: str) -> int:
        parts = (self.model, self.kv, self.kv_window, self.state, self.compute, self.draft)
        total = sum(part.get(device, 0) for part in parts)
        return total + (self.output if device == HOST else 0)


def known(arch: str) -> bool:
    """Whether memfit has the graph of an architecture."""
    return arch in RECIPES


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Weights, caches and states of one run, before its graph is looked at."""

    model: GgufModel
    settings: Settings
    machine: Machine
    places: Places
    buffers: Buffers


def storage(model: GgufModel, settings: Settings, machine: Machine) -> Storage:
    if not known(model.arch):
        raise InputError.one(
            f"llama.cpp's graph of the architecture `{model.arch}` is not supported yet",
            where="model",
        )
    recipe = RECIPES[model.arch]
    if not recipe.flash:
        settings = replace(settings, flash=False)
    if recipe.encodes:  # each token gives an output
        settings = replace(settings, embedding=True, batch=settings.ubatch)
    if recipe.layers == "encoder_decoder":  # logits of all tokens are reserved
        if settings.streams > 1:
            raise InputError.one(
                f"llama.cpp's graph of `{model.arch}` has one cache for all slots, and stops with "
                f"{settings.streams} of them",
                where="-np",
                hint="add `--kv-unified`, or use `-np 1`",
            )
        settings = replace(settings, all_outputs=True)
    places = place(model, settings, machine)
    caches = layer_caches(model, settings)
    found = Buffers(
        model=model.once(("weights", places.key), lambda: model_buffers(model, places, machine)),
        kv=_by_device(places, caches, lambda one: 0 if one.slides else one.kv),
        kv_window=_by_device(places, caches, lambda one: one.kv if one.slides else 0),
        state=_by_device(places, caches, lambda one: one.state),
        output=output_bytes(model, settings),
        layers=places.layers,
    )
    return Storage(model=model, settings=settings, machine=machine, places=places, buffers=found)


def with_compute(one: Storage) -> Buffers:
    """All buffers, those that the graph needs among them."""
    pipeline = pipelined(one.model, one.settings, one.machine, one.places)
    compute, splits = compute_buffers(
        one.model, one.settings, one.machine, one.places, pipeline=pipeline
    )
    held = replace(one.buffers, compute=compute, pipeline=pipeline, splits=splits)
    return held if one.settings.draft is None else replace(held, draft=drafting(one, held))


def drafting(one: Storage, held: Buffers) -> dict[str, int]:
    """All buffers of the draft model, which is loaded into what the model leaves."""
    draft, machine = one.settings.draft, one.machine
    assert draft is not None
    left = {
        name: max(1, free - held.on(name))
        for name, free in zip(machine.devices, machine.free, strict=True)
    }
    if draft.device >= 0:
        name = machine.devices[draft.device]
        left = {name: left[name]}
    own = replace(machine, free=tuple(left.values()))
    found = buffers(draft.model, draft.settings(one.settings), own)
    times = draft.contexts(one.settings)

    def total(name: str) -> int:
        weights = found.model.get(name, 0)
        return weights + times * (found.on(name) - weights)

    names = dict(zip((*left, HOST), (*own.devices, HOST), strict=True))
    return {name: total(its) for name, its in names.items()}


def buffers(model: GgufModel, settings: Settings, machine: Machine) -> Buffers:
    return with_compute(storage(model, settings, machine))


def _by_device(places: Places, caches: list[LayerCache], part: object) -> dict[str, int]:
    found: dict[str, int] = {}
    assert callable(part)
    for device, cache in zip(places.caches, caches, strict=False):
        size = part(cache)
        if size:
            found[device] = found.get(device, 0) + size
    return found


def output_bytes(model: GgufModel, settings: Settings) -> int:
    """Logits, and embeddings if asked for, a row a sequence (`output_reserve`)."""
    values = model.vocabulary
    if settings.embedding or settings.keeps_embeddings:
        values += model.width
    return 4 * values * settings.parallel


def pipelined(model: GgufModel, settings: Settings, machine: Machine, places: Places) -> bool:
    """Several GPUs with all layers work as a pipeline; then inputs are held several times."""
    return (
        len(machine.devices) > 1
        and machine.backend.pipelines
        and settings.gpu_layers > model.number("block_count")
        and settings.kv_offload
        and not settings.overrides
        and not settings.cpu_moe
    )


def compute_buffers(
    model: GgufModel, settings: Settings, machine: Machine, places: Places, *, pipeline: bool
) -> tuple[dict[str, int], int]:
    """The graph allocator's result for the largest batch (`graph_reserve`), and the parts that the
    graph is split into. They depend on what differs from layer to layer, not on which layers that
    is; so they are the same for most numbers of layers on the CPU."""
    alike = model.once(
        ("alike", places.key),
        lambda: [signature(model, places, layer) for layer in range(model.layers)],
    )
    order = enough_layers(alike)
    copies = model.number("embedding_length_per_layer_input") and len(set(places.layers)) > 1
    if copies or "attention.indexer.top_k" in model.facts:
        order = list(range(model.layers))  # each layer has its own input
    key = (
        replace(settings, gpu_layers=0, cpu_moe=0, overrides=(), split=(), draft=None),
        settings.gpu_layers > model.number("block_count"),
        tuple(alike[layer] for layer in order),
        tuple(places.tensors[one.name] for one in model.of_layer(-1)),
        places.output,
        machine,
        pipeline,
    )
    return model.once(key, lambda: reserved(model, settings, machine, places, order, pipeline))


def reserved(
    model: GgufModel,
    settings: Settings,
    machine: Machine,
    places: Places,
    order: list[int],
    pipeline: bool,
) -> tuple[dict[str, int], int]:
    builder = Builder(model, settings, places, window_cells(model, settings), order)
    graphs.build(builder)
    scheduler = Scheduler(
        (*machine.devices, HOST),
        machine.pools,
        op_offload=settings.op_offload,
        copies=COPIES if pipeline else 1,
        kept=builder.kept,
        fixed=builder.fixed,
    )
    return scheduler.schedule(builder.graph), scheduler.splits


def enough_layers(alike: Sequence[object]) -> list[int]:
    """Layers that a graph needs to show its peak: the allocator's state repeats from one equal
    layer, or group of layers, to the next, so three in a row stand for all that follow. `alike`:
    what tells each of the model's layers apart."""
    kept: list[int] = []
    at, count = 0, len(alike)
    while at < count:
        length, times = 1, 1
        for period in range(1, LONGEST_PERIOD + 1):
            block, repeats = alike[at : at + period], 1
            while alike[at + repeats * period : at + (repeats + 1) * period] == block:
                repeats += 1
            if repeats > ENOUGH and repeats * period > length * times:
                length, times = period, repeats
        kept.extend(range(at, at + length * min(times, ENOUGH)))
        at += length * times
    return kept


LONGEST_PERIOD, ENOUGH = 8, 3


def signature(model: GgufModel, places: Places, layer: int) -> object:
    """What tells layers apart for the allocator: their tensors' shapes and places, and, where the
    weights of the CPU are copied, their types."""
    tensors = model.of_layer(layer)
    homes = tuple(places.tensors[tensor.name] for tensor in tensors)
    types = tuple(
        tensor.type.name if home == HOST else ""
        for tensor, home in zip(tensors, homes, strict=True)
    )
    shapes = model.shapes.get(layer, ())
    heads = (model.heads(layer), model.kv_heads(layer))
    sparse = layer < RECIPES[model.arch].sparse
    own = model.cache_of(layer) == layer
    turned = (model.slides(layer), graphs.rotates(model, layer), own, sparse)
    return (*heads, *turned, places.layers[layer], places.caches[layer], shapes, homes, types)


__all__ = ["Buffers", "buffers", "compute_buffers", "known", "replace", "storage", "with_compute"]
