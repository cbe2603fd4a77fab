"""Which device holds which tensor.

Rules: `llama_model::load_tensors` of src/llama-model.cpp (llama.cpp b7437 to b11549): the input
table stays on the CPU; layers go to the GPUs from the last one backwards, in shares of their free
memory or of `-ts`; `-ot` and `--n-cpu-moe` override by name.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence

from memfit.lazy_dataclass import dataclass
from memfit.serving.llamacpp.allocator import CPU, CUDA, METAL, VULKAN, Pool
from memfit.serving.llamacpp.builder import Places
from memfit.serving.llamacpp.model import GgufModel, GgufTensor
from memfit.serving.llamacpp.recipes import RECIPES
from memfit.serving.llamacpp.settings import OUTPUT_FIRST, Settings

HOST = "CPU"
INPUTS = (
    "token_embd.",
    "token_embd_norm.",
    "position_embd.",
    "token_types.",
    "per_layer_token_embd.",
)
ENDS = ("output.", "output_norm.", "enc.output_norm.", "dec.output_norm.", "cls.", "cls.output.")
EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A kind of device: how it places tensors, how it calls itself, what it can do. `host`: the
    buffer of pinned memory that the CPU then uses."""

    name: str
    pool: Pool
    host: str = ""
    pipelines: bool = False
    maps_file: bool = False  # reads the file's own pages (unified memory)

    def device(self, index: int) -> str:
        return f"{self.name}{index}"


BACKENDS: Mapping[str, Backend] = {
    "cuda": Backend(name="CUDA", pool=CUDA, host="CUDA_Host", pipelines=True),
    "rocm": Backend(name="ROCm", pool=CUDA, host="ROCm_Host", pipelines=True),
    "vulkan": Backend(name="Vulkan", pool=VULKAN, host="Vulkan_Host"),
    "metal": Backend(name="MTL", pool=METAL, maps_file=True),
    "cpu": Backend(name="CPU", pool=CPU),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of one run; `free` bytes decide the shares of layers."""

    backend: Backend
    free: tuple[int, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.backend.device(index) for index in range(len(self.free)))

    @property
    def pools(self) -> dict[str, Pool]:
        return {**dict.fromkeys(self.devices, self.backend.pool), HOST: CPU}


def layer_devices(model: GgufModel, settings: Settings, machine: Machine) -> list[str]:
    """A device for each layer and, last, for the output."""
    layers, devices = model.number("block_count"), machine.devices
    if not devices:
        return [HOST] * (layers + 1)
    first = layers + 1 if settings.build >= OUTPUT_FIRST else layers
    start = max(first - settings.gpu_layers, 0)
    active = min(settings.gpu_layers, layers + 1)
    given = settings.split if any(settings.split) else machine.free
    shares = [float(one) for one in given[: len(devices)]]
    shares += [0.0] * (len(devices) - len(shares))
    total = sum(shares) or 1.0
    points = [sum(shares[: index + 1]) / total for index in range(len(devices))]

    def device(layer: int) -> str:
        if layer < start or layer - start >= active:
            return HOST
        place = bisect_right(points, (layer - start) / active)
        return devices[min(place, len(devices) - 1)]

    return [device(layer) for layer in range(layers + 1)]


def overridden(name: str, layer: int, settings: Settings) -> str | None:
    """The buffer that a flag demands for a tensor of a layer (-1: of none)."""
    for pattern, place in settings.overrides:
        if re.search(pattern, name):
            return place
    return HOST if 0 <= layer < settings.cpu_moe and EXPERTS.search(name) else None


def place(model: GgufModel, settings: Settings, machine: Machine) -> Places:
    """Remembered by what it depends on, which the length of the context is not."""
    layers = (*layer_devices(model, settings, machine), machine.devices, machine.backend)
    key = ("places", *layers, settings.overrides, settings.cpu_moe, settings.kv_offload)
    return model.once(key, lambda: placed(model, settings, machine, key))


def placed(model: GgufModel, settings: Settings, machine: Machine, key: Hashable) -> Places:
    layers = layer_devices(model, settings, machine)
    output = layers[-1]

    def home(tensor: GgufTensor, layer: int) -> str:
        asked = overridden(tensor.name, layer, settings)
        if asked is not None:
            return asked if asked in machine.devices else HOST
        if layer < 0 and tensor.name.startswith(INPUTS):
            return HOST
        if layer < 0 and tensor.name.startswith(ENDS):
            return output
        return layers[max(0, layer)]

    caches = [one if settings.kv_offload else HOST for one in layers[:-1]]
    return Places(
        tensors={
            tensor.name: home(tensor, layer)
            for layer, tensors in model.layered.items()
            for tensor in tensors
        },
        layers=tuple(layers[:-1]),
        caches=tuple(caches),
        output=output,
        cpu=HOST,
        key=key,
    )


def model_buffers(model: GgufModel, places: Places, machine: Machine) -> dict[str, int]:
    """Bytes of weights on each device; a tied output is held a second time where a GPU needs it."""
    held = dict.fromkeys((*machine.devices, HOST), 0)
    pools = machine.pools
    if machine.backend.maps_file:
        return mapped(model, places, machine)
    sizes = {device: sizes_in(model, pools[device]) for device in held}
    for layer, tensors in model.layered.items():
        for tensor in tensors if layer < model.layers else loaded_anyway(model, layer):
            device = places.tensors[tensor.name]
            held[device] += sizes[device][tensor.name]
    if tied(model) and places.output != HOST:
        table = model.by_name.get("token_embd.weight")
        if table is not None:
            held[places.output] += stored_bytes(table, pools[places.output])
    return held


# Of layers that predict further tokens b11549 loads what load_arch_tensors takes for optional,
# since it forgets there to skip it (src/models/step35.cpp, glm-dsa.cpp). The rest is not loaded.
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "step35": (
        *("attn_q_norm", "attn_k_norm", "attn_gate", "ffn_gate", "ffn_up", "ffn_down"),
        *("exp_probs_b", "nextn.embed_tokens", "nextn.shared_head"),
    ),
    "glm-dsa": ("exp_probs_b",),
}


def loaded_anyway(model: GgufModel, layer: int) -> list[GgufTensor]:
    names = tuple(f"blk.{layer}.{one}" for one in OPTIONAL.get(model.arch, ()))
    return [one for one in model.of_layer(layer) if names and one.name.startswith(names)]


def tied(model: GgufModel) -> bool:
    """Whether the input table is the output matrix as well; encoders have no output matrix."""
    return "output.weight" not in model.by_name and not RECIPES[model.arch].encodes


def mapped(model: GgufModel, places: Places, machine: Machine) -> dict[str, int]:
    """Unified memory: each device maps the file from its first tensor to its last one, and what
    lies between. `llama-quantize` writes tensors by layer and name, those outside layers first."""
    spans: dict[str, tuple[int, int]] = {}
    at = 0
    for tensor in in_file_order(model):
        size = -(-tensor.bytes // ALIGNMENT) * ALIGNMENT
        device = places.tensors[tensor.name]
        twice = tensor.name == "token_embd.weight" and tied(model)
        for one in {device, places.output} if twice else {device}:
            first, _ = spans.get(one, (at, 0))
            spans[one] = (first, at + size)
        at += size
    return {
        device: spans[device][1] - spans[device][0] if device in spans else 0
        for device in (*machine.devices, HOST)
    }


def in_file_order(model: GgufModel) -> list[GgufTensor]:
    """As a file has them; without a file, as `llama-quantize` would write them."""
    if model.origin:
        return list(model.tensors)
    return sorted(model.tensors, key=lambda tensor: (tensor.layer, tensor.name))


ALIGNMENT = 32  # GGUF_DEFAULT_ALIGNMENT


def sizes_in(model: GgufModel, pool: Pool) -> Mapping[str, int]:
    """Bytes of each tensor on a device that places tensors as `pool` does."""
    return model.once(
        ("sizes", pool), lambda: {one.name: stored_bytes(one, pool) for one in model.tensors}
    )


def stored_bytes(tensor: GgufTensor, pool: Pool) -> int:
    size, row = tensor.bytes, tensor.type
    if pool.row_padding and row.block > 1 and tensor.sizes[0] % pool.row_padding:
        extra = pool.row_padding - tensor.sizes[0] % pool.row_padding
        size += extra // row.block * row.block_bytes
    return pool.aligned(size)


def split_evenly(devices: Sequence[str], layers: Sequence[str]) -> dict[str, int]:
    """How many layers each device has."""
    return {device: sum(one == device for one in layers) for device in devices}
