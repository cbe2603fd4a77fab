"""SGLang's defaults that depend on its version and the GPU's memory: tokens of a prefill piece, the
largest batch of a CUDA graph, and the share of the memory for weights and cache.

Source: `srt/server_args.py` of 0.4.3 to 0.4.5, 0.4.6.post1, 0.4.7, 0.4.8, 0.4.9, 0.5.0rc2, 0.5.2,
0.5.3, 0.5.5, 0.5.9, 0.5.10 to 0.5.13.post1, 0.5.15 and 0.5.18. A version between two that were read
has the rules of the earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from memfit.errors import InputError
from memfit.lazy_dataclass import dataclass
from memfit.serving.vllm.rules import parse

# MiB of GPU memory below which a size of prefill pieces and of CUDA graphs (below 4 ranks, and from
# 4 on) holds.
Sizes = tuple[tuple[int, int, int, int], ...]
ANY = 1 << 62
SINCE_053: Sizes = (
    (20 * 1024, 2048, 8, 8),
    (35 * 1024, 2048, 24, 80),
    (60 * 1024, 4096, 32, 160),
    (160 * 1024, 8192, 256, 512),
    (ANY, 16384, 512, 512),
)
SINCE_048: Sizes = (
    (35 * 1024, 2048, 8, 80),
    (160 * 1024, 8192, 160, 160),
    (ANY, 16384, 160, 160),
)
SINCE_047: Sizes = ((25_000, 2048, 8, 80), (180_001, 8192, 160, 160), (ANY, 16384, 160, 160))
FIRST: Sizes = ((25_000, 2048, 8, 80), (ANY, 8192, 160, 160))
# Ranks from which on a share of the memory holds, until 0.4.8.
SHARES = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (0, 0.88))
LARGE = 81920  # MiB
# MiB below which weights and cache leave so many GiB, and so many more for each rank, until 0.5.3.
RESERVES = (
    (35 * 1024, 2.8, 0.1),
    (90 * 1024, 9.5, 0.5),
    (160 * 1024, 12.0, 0.5),
    (ANY, 32.0, 0.0),
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the fraction depends on: MiB of the GPU, ranks of a model, replicas of attention."""

    memory: float
    ranks: int
    copies: int
    chunk: int
    graphs: int
    dp_attention: bool
    draft: str
    latent: bool = False  # attention is MLA
    pieces: bool = False  # prefill has CUDA graphs, where the version has them by default


def shared(launch: Launch) -> float:
    """By ranks alone (0.4.3)."""
    return next(share for ranks, share in SHARES if launch.ranks >= ranks)


def shared_or_left(launch: Launch) -> float:
    """Large GPUs keep 13 GiB (0.4.6.post1)."""
    if launch.memory <= LARGE:
        return shared(launch)
    return (launch.memory - 13 * 1024) / launch.memory


def grown(launch: Launch) -> float:
    """Large GPUs keep at least 18 GiB, 20 with a draft model (0.4.7)."""
    share = shared(launch) if launch.memory <= LARGE else 0.88
    if launch.memory > 180 * 1000:
        return 0.79
    if launch.memory > 96 * 1024:
        kept = (20 if launch.draft else 18) * 1024
        more = share + 48 * 1024 * (1 - share) / launch.memory
        return min(more, (launch.memory - kept) / launch.memory)
    return share * (0.95 if launch.draft else 1)


def reserved(launch: Launch) -> float:
    """A reserve by the size of the GPU (0.4.8 to 0.5.2)."""
    gib, each = next(row[1:] for row in RESERVES if launch.memory < row[0])
    taken = (gib + each * launch.ranks) * 1024
    taken += {"": 0, "STANDALONE": 6 * 1024}.get(launch.draft, 2 * 1024)
    taken += 4 * 1024 if launch.dp_attention else 0
    return round((launch.memory - taken) / launch.memory, 3)


def summed(launch: Launch) -> float:
    """A reserve for activations and CUDA graphs, and 2 GiB for a draft model (0.5.3 to 0.5.9)."""
    return left(launch, 0, 2)


def with_pieces(launch: Launch) -> float:
    """CUDA graphs of prefill, too, and 4 GiB for a draft model (0.5.10 to 0.5.13.post1)."""
    return left(launch, piece_graphs(launch), 4)


def without_draft(launch: Launch) -> float:
    """CUDA graphs of prefill; a draft model counts in the pool itself (0.5.15 on)."""
    return left(replace(launch, draft=""), piece_graphs(launch), 0)


def left(launch: Launch, pieces: float, draft: float) -> float:
    """The share that a sum of reserves leaves, in MiB; `draft` is in GiB."""
    taken = 512 + max(launch.chunk, 2048) * 1.5 + launch.graphs * 2 + launch.ranks / 8 * 1024
    if launch.dp_attention:
        taken += launch.graphs * launch.copies * 3
        taken += launch.graphs * launch.copies * 1.5 if launch.graphs > 300 else 0
    taken += pieces
    if launch.memory > 60 * 1024:
        taken = max(taken, 10 * 1024)
    taken += {"": 0, "NGRAM": 0, "STANDALONE": 6 * 1024}.get(launch.draft, draft * 1024)
    return round((launch.memory - taken) / launch.memory, 3)


# Token counts that have a CUDA graph of prefill: from, to, and the step
# (_generate_piecewise_cuda_graph_tokens)
PIECES = (
    *((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64)),
    *((1280, 4096, 256), (4608, ANY, 512)),
)


def piece_graphs(launch: Launch) -> float:
    """MiB for CUDA graphs of prefill: 8 for each, or 1.5 GiB with MLA."""
    if not launch.pieces:
        return 0
    if launch.latent:
        return 1.5 * 1024
    counts = (
        (min(launch.chunk, last) - first) // step + 1
        for first, last, step in PIECES
        if launch.chunk >= first
    )
    return 8.0 * sum(counts)


def twentieth(vision: Mapping[str, Any]) -> float:
    """What a vision tower takes of the fraction, whatever its size (0.4.3 to 0.4.4)."""
    return 0.95


def tenth(vision: Mapping[str, Any]) -> float:
    """What a vision tower takes of the fraction, whatever its size (0.4.5 to 0.4.8)."""
    return 0.9


# as adjust_mem_fraction_for_vlm reads them, where the config has none
BY_SIZE = (("num_hidden_layers", 24), ("hidden_size", 1024))


def natural(config: Mapping[str, Any], key: str, default: int) -> int:
    """A positive integer of a config."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError.one(
            f"`{key}: {str(value)[:40]}` must be an integer of at least 1",
            where="config.vision_config",
        )
    return value


def by_size(vision: Mapping[str, Any]) -> float:
    """What a vision tower takes of the fraction (adjust_mem_fraction_for_vlm, 0.5.2)."""
    layers, width = (natural(vision, *one) for one in BY_SIZE)
    ratio = layers * width**2 / (24 * 1024**2)
    return float(0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (ratio - 1.0))))


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """The defaults of some versions. `windows`: sliding layers have pools of their own."""

    sizes: Sizes
    fraction: Callable[[Launch], float]
    vision: Callable[[Mapping[str, Any]], float]
    windows: bool = True
    draft_in_pool: bool = False  # weights and cache of a draft model are part of the share
    vision_always: bool = False  # a vision tower takes its part of a given fraction, too
    pieces_alone: bool = True  # images, draft models or DP attention switch graphs of prefill off


# Before 0.4.9 the runner of a model with a vision tower lowers the fraction, given or not
# (model_executor/model_runner.py __init__, 0.4.3 to 0.4.8).
BY_RUNNER: dict[str, Any] = {"vision": tenth, "vision_always": True, "windows": False}
# From which version on what holds, the newest first.
VERSIONS: tuple[tuple[tuple[int, ...], Defaults], ...] = (
    (
        (0, 5, 15),
        Defaults(
            sizes=SINCE_053,
            fraction=without_draft,
            vision=by_size,
            draft_in_pool=True,
            pieces_alone=False,
        ),
    ),
    ((0, 5, 10), Defaults(sizes=SINCE_053, fraction=with_pieces, vision=by_size)),
    ((0, 5, 3), Defaults(sizes=SINCE_053, fraction=summed, vision=by_size)),
    ((0, 5, 2), Defaults(sizes=SINCE_048, fraction=reserved, vision=by_size)),
    ((0, 5, 0), Defaults(sizes=SINCE_048, fraction=reserved, vision=by_size, windows=False)),
    ((0, 4, 9), Defaults(sizes=SINCE_048, fraction=reserved, vision=by_size, windows=False)),
    ((0, 4, 8), Defaults(sizes=SINCE_048, fraction=reserved, **BY_RUNNER)),
    ((0, 4, 7), Defaults(sizes=SINCE_047, fraction=grown, **BY_RUNNER)),
    ((0, 4, 6), Defaults(sizes=FIRST, fraction=shared_or_left, **BY_RUNNER)),
    ((0, 4, 5), Defaults(sizes=FIRST, fraction=shared, **BY_RUNNER)),
    ((0, 0, 0), Defaults(sizes=FIRST, fraction=shared, **{**BY_RUNNER, "vision": twentieth})),
)


def defaults_of(version: str) -> Defaults:
    """The defaults of one version; of the newest where none is named."""
    number = parse(version) if version else VERSIONS[0][0]
    return next(found for since, found in VERSIONS if number >= since)


__all__ = ["Defaults", "Launch", "defaults_of"]
