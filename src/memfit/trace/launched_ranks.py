"""A script as one rank of many, as `torchrun` would start it: the environment says so, and the
process group that it joins sends nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from memfit.trace import collectives, cuda, ranks, stages, streams
from memfit.trace.activation_offload import Away
from memfit.trace.imports import Patch
from memfit.trace.origins import origin
from memfit.trace.refuse import Watcher


def environment(rank: int, world: int) -> dict[str, str]:
    """Every rank has a machine of its own here, whose GPU has index 0."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
    }


class RankWatcher(Watcher, Away):
    """A recorder of one rank's script: buckets that DDP makes are on the GPU."""


@contextlib.contextmanager
def followed(recorder: Watcher, rank: int, world: int) -> Iterator[None]:
    """Inside, the script finds itself started as rank `rank` of `world`."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(environment(rank, world))
    collectives.install()
    recorder.origin = origin
    recorder.groups = Groups()
    true = dist.distributed_c10d.init_process_group

    def join(*_: Any, **given: Any) -> None:
        if not dist.is_initialized():
            true("fake", rank=rank, world_size=world, store=FakeStore())

    patches: list[Patch] = [
        (dist, "init_process_group", join),
        (dist.distributed_c10d, "init_process_group", join),
        (dist, "is_nccl_available", lambda: True),
        (torch._C, "_get_accelerator", lambda *_: torch.device("cuda")),
        (dist, "get_backend", lambda *_, **__: "nccl"),
        (dist, "barrier", lambda *_, **__: None),
    ]
    # The same for all ranks, and its own answer is this rank's
    patches += [(dist, "broadcast_object_list", lambda *_, **__: None)]
    with (
        streams.followed(recorder),
        cuda.patched(
            [*ranks.storages(recorder), *ranks.aside(recorder), *stages.settled(recorder), *patches]
        ),
    ):
        yield


class Groups(dict[str, str]):
    """Every group is one of ranks that have the same model."""

    def __missing__(self, name: str) -> str:
        return "ddp"


__all__ = ["followed"]
