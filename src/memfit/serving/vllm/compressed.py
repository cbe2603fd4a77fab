"""DeepSeek-V4's cache in vLLM: pages of several sizes in one block, and groups of layers that share
them; what its kernels reserve.

Source: vLLM 0.25.0 `v1/core/kv_cache_utils.py` group_and_unify_kv_cache_specs,
_get_kv_cache_groups_uniform_groups and _get_kv_cache_config_packed; `models/deepseek_v4/`.
"""

from __future__ import annotations

from collections import Counter

from memfit.lazy_dataclass import dataclass
from memfit.model.modules import Layer
from memfit.serving.compressed import is_compressed
from memfit.serving.parts import INDEX_BLOCK, Compressed
from memfit.serving.vllm.cache import Group, Layout, Spec
from memfit.serving.vllm.setup import Setup
from memfit.serving.weights import layers_of
from memfit.units import MIB

BLOCK, WINDOW_BLOCK = 256, 64  # tokens (sparse_swa.py get_preferred_block_size, block_size)
STATE_BLOCKS = {4: 4, 128: 8}  # tokens whose states share a page (compressor.py)
ENTRY = 584  # bytes: 448 in fp8, 64 in 16 bits, 8 of scales
ALIGNED = 576
FLOAT = 4
PREFILLS = 4  # prompts at once (attention.py PREFILL_CHUNK_SIZE)
GATHERED = 40  # lengths of keys that the indexer gathers (indexer.py get_max_prefill_buffer_size)
LOGITS = 512 * MIB  # envs.py VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
FLASHINFER = 128 * MIB  # flashinfer_sparse.py, on 12.0
HEADS = (64, 128)  # FlashMLA's
HEADS_12 = (16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Packed(Layout):
    """`first` are bytes that a block takes in all layers of the first group, `whole` those of the
    largest group in pages of every size."""

    first: int
    whole: int

    def request_bytes(self, length: int, batched: int) -> int:
        return self.whole * sum(group.spec.pages(length, batched) for group in self.groups)

    def concurrency(self, blocks: int, length: int, batched: int) -> float:
        used = sum(group.spec.page * group.spec.pages(length, batched) for group in self.groups)
        return blocks / -(-used // self.first) if used else 0.0


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def mixers(layers: tuple[Layer, ...]) -> list[Compressed]:
    every = (block.mixer for layer in layers for block in layer.blocks)
    return [mixer for mixer in every if isinstance(mixer, Compressed)]


def refused_cache(setup: Setup) -> tuple[str, str]:
    """The error where the cache is not in 8 bits, and what works; both empty if it starts. Newer
    versions take 8 bits by themselves (attention.py _resolve_dsv4_kv_cache_dtype)."""
    taken = "fp8" if setup.kv_dtype == "auto" and setup.rules.eighth_by_itself else setup.kv_dtype
    if not is_compressed(setup.model) or taken.startswith("fp8"):
        return "", ""
    return (
        f"AssertionError: DeepseekV4 fp8_ds_mla layout only supports fp8 kv-cache, got {taken}",
        "--kv-cache-dtype fp8",
    )


def packed(setup: Setup) -> Packed:
    """The groups, with a cache in 8 bits: one of all entries, and windows and states by their
    length, each split until it has about as many layers as the others."""
    found = mixers((*layers_of(setup.rank, setup.model), *setup.draft))
    entries: Counter[int] = Counter()
    windows: dict[tuple[int, int], Counter[int]] = {}
    for one in found:
        near = windows.setdefault((WINDOW_BLOCK, one.window), Counter())
        near[aligned(WINDOW_BLOCK * ENTRY)] += 1
        if one.ratio == 1:
            continue
        wide = 1 + bool(one.index)
        block = STATE_BLOCKS[one.ratio]
        entries[aligned(BLOCK // one.ratio * ENTRY)] += 1
        states = windows.setdefault((block, wide * one.ratio), Counter())
        states[aligned(block * 2 * wide * one.head * FLOAT)] += 1
        if one.index:
            key = one.index + one.index // INDEX_BLOCK * FLOAT
            entries[aligned(BLOCK // one.ratio * key)] += 1
            states[aligned(block * 2 * wide * one.index * FLOAT)] += 1
    first = sum(size * count for size, count in entries.items())
    groups = [Group(spec=Spec(kind="full", block=BLOCK, page=first), layers=max(entries.values()))]
    tuples = [groups[0].layers, *(max(one.values()) for one in windows.values())]
    most = least_padding(tuples)
    slots = entries
    for (block, window), sizes in windows.items():
        larger: Counter[int] = Counter()
        for size, count in sizes.items():
            larger[min(one for one in entries if one >= size)] += count
        count = max(larger.values())
        parts = -(-count // most)
        for index in range(parts):
            layers = len(range(index, count, parts))
            page = layers * sum(larger)
            spec = Spec(kind="sliding", block=block, page=page, window=window)
            groups.append(Group(spec=spec, layers=layers))
            slots = slots | Counter(dict.fromkeys(larger, layers))
    return Packed(
        groups=tuple(groups),
        per_block=sum(size * count for size, count in slots.items()),
        first=first,
        whole=max(one.layers for one in groups) * sum(entries),
    )


def least_padding(values: list[int]) -> int:
    """The number of layers at which groups are padded least, and the largest such
    (_approximate_gcd)."""
    return min(
        range(values[0], max(values) + 1),
        key=lambda size: (sum(-one % size for one in values), -size),
        default=values[0],
    )


def buffers(setup: Setup) -> list[int]:
    """What the model sets up beside its weights: the tokens that the indexer picked, and the
    streams behind the last layer, which a draft reads."""
    if not is_compressed(setup.model):
        return []
    config = setup.subject.config
    picked = setup.batched * int(config["index_topk"]) * FLOAT
    streams = setup.batched * int(config["hc_mult"]) * setup.model.width * setup.width
    return [picked, streams, *([picked] if setup.draft else [])]


def activations(setup: Setup) -> int:
    """The workspace that stays after the first step, and the step's peak: two of the model's four
    streams, queries and outputs of all heads that the kernel computes, and the indexer's scores."""
    config, tokens = setup.subject.config, setup.batched
    modern = setup.sm is not None and setup.sm[0] == 12
    found = mixers(setup.model.layers)
    heads = found[0].heads // setup.rank.heads
    computed = next((one for one in (HEADS_12 if modern else HEADS) if one >= heads), heads)
    gathered = 0
    for one in found:
        if one.index:
            key = one.index + FLOAT
            gathered = max(gathered, GATHERED * setup.length // one.ratio * key)
        entries = -(-setup.length // one.ratio) if one.ratio > 1 else 0
        prompts = PREFILLS * (entries + one.window + tokens) * one.head * setup.width
        gathered = max(gathered, 0 if modern else prompts)
    streams = 2 * int(config["hc_mult"]) * tokens * setup.model.width * setup.width
    inside = 2 * tokens * computed * found[0].head * setup.width
    scores = LOGITS if any(one.index for one in found) else 0
    return gathered + (FLASHINFER if modern else 0) + streams + inside + scores


__all__ = ["activations", "buffers", "is_compressed", "packed", "refused_cache"]
