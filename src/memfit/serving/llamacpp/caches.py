"""The KV cache and the recurrent states, by layer.

Rules: src/llama-kv-cache.cpp, llama-kv-cache-iswa.cpp, llama-memory-recurrent.cpp and `n_embd_r`,
`n_embd_s` of llama-hparams.cpp (llama.cpp b7437 to b11549).
"""

from __future__ import annotations

from memfit.lazy_dataclass import dataclass
from memfit.serving.llamacpp.builder import KINDS
from memfit.serving.llamacpp.model import GgufModel
from memfit.serving.llamacpp.settings import LATENT_ONLY, Settings
from memfit.units import round_up


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """Bytes that one layer keeps: keys, values, states."""

    keys: int = 0
    values: int = 0
    state: int = 0
    slides: bool = False

    @property
    def kv(self) -> int:
        return self.keys + self.values


def window_cells(model: GgufModel, settings: Settings) -> int:
    """Tokens that a sliding layer keeps: the window, a micro-batch, rounded up to 256."""
    if not any(model.sliding):
        return 0
    if settings.swa_full:
        return settings.cells
    batch = min(settings.ubatch, settings.batch, settings.cells * settings.streams)
    users = settings.parallel if settings.shared else 1
    return round_up(min(settings.cells, model.window * users + batch), 256)


def recurrent(model: GgufModel, layer: int) -> bool:
    """Whether a layer keeps a state instead of keys and values."""
    names = model.by_name
    prefix = f"blk.{layer}."
    return any(
        f"{prefix}{name}" in names
        for name in ("ssm_conv1d.weight", "shortconv.conv.weight", "time_mix_w1.weight")
    )


def attends(model: GgufModel, layer: int) -> bool:
    """Whether a layer has attention of its own keys."""
    names, prefix = model.by_name, f"blk.{layer}."
    if f"dec.{prefix}attn_k.weight" in names:
        return True
    return any(
        f"{prefix}{name}.weight" in names for name in ("attn_k", "attn_qkv", "attn_kv_a_mqa")
    ) and not recurrent(model, layer)


def state_values(model: GgufModel) -> tuple[int, int]:
    """Values of one sequence's convolution and of its recurrence."""
    short = model.number("shortconv.l_cache")
    if short:
        return model.width * (short - 1), 0
    conv, inner = model.number("ssm.conv_kernel"), model.number("ssm.inner_size")
    groups, state = model.number("ssm.group_count"), model.number("ssm.state_size")
    if not conv:
        return 0, 0
    return (conv - 1) * (inner + 2 * groups * state), state * inner


def layer_caches(model: GgufModel, settings: Settings) -> list[LayerCache]:
    """Of every layer. Layers alike keep as much, so one of each kind is counted."""
    kinds = model.once("kinds of caches", lambda: [kind(model, one) for one in range(model.layers)])
    made: dict[object, LayerCache] = {}
    for layer, one in enumerate(kinds):
        if one not in made:
            made[one] = layer_cache(model, settings, layer)
    return [made[one] for one in kinds]


def kind(model: GgufModel, layer: int) -> object:
    """What decides how much a layer keeps, beside the settings."""
    return (
        model.kv_heads(layer),
        model.head(layer),
        model.value_head(layer),
        model.slides(layer),
        model.cache_of(layer) == layer,
        recurrent(model, layer),
        attends(model, layer),
        f"blk.{layer}.indexer.proj.weight" in model.by_name,
    )


def layer_cache(model: GgufModel, settings: Settings, layer: int) -> LayerCache:
    if recurrent(model, layer):
        conv, state = state_values(model)
        return LayerCache(state=4 * (conv + state) * settings.parallel)
    hybrid = "ssm.conv_kernel" in model.facts or "shortconv.l_cache" in model.facts
    if not model.facts.get("attention.causal", True) or (hybrid and not attends(model, layer)):
        return LayerCache()
    if model.cache_of(layer) != layer:
        return LayerCache()
    slides = model.slides(layer)
    cells = window_cells(model, settings) if slides else settings.cells
    heads, tokens = model.kv_heads(layer), cells * settings.streams

    def row(values: int, kind: str) -> int:
        found = KINDS[kind]
        return -(-values // found.block) * found.bytes

    keys = row(model.head(layer) * heads, settings.cache_k) * tokens
    # without flash attention all layers keep as many values as the widest [TAG_V_CACHE_VARIABLE]
    wide = model.value_head(layer) * heads if settings.flash else model.widest_values
    values = row(wide, settings.cache_v) * tokens
    if "attention.key_length_mla" in model.facts and settings.build >= LATENT_ONLY:
        values = 0
    if f"blk.{layer}.indexer.proj.weight" in model.by_name:
        keys += row(model.number("attention.indexer.key_length"), settings.cache_k) * tokens
    return LayerCache(keys=keys, values=values, slides=slides)
