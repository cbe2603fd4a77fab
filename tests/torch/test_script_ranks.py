"""Scripts as one rank of several: what each holds is what the same layout holds by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.cli_trace import split
from memfit.errors import InputError
from memfit.verbs import trace

HEAD = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 8
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(16)]).cuda()
"""
REPLICAS = """
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(model, device_ids=[0])
"""
SHARDS = """
from torch.distributed.fsdp import fully_shard

for layer in model:
    fully_shard(layer)
fully_shard(model)
"""
STEPS = """
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(3):
    loss = model(torch.randn(4, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
dist.destroy_process_group()
"""
WEIGHTS = 16 * 512 * 512 * 4


def peak(folder: Path, wrap: str) -> int:
    script = folder / "train.py"
    script.write_text(HEAD + wrap + STEPS)
    found = trace(script, gpu="a100-sxm-80gb", ranks=8, rank=3)
    assert found.script is not None
    assert found.script.steps == 3
    assert found.strategy.ranks == 8
    return found.memory.allocated


def test_replicas_hold_everything_and_buckets(tmp_path: Path) -> None:
    """Weights, gradients, DDP's buckets (gradients are no views of them) and two states, beside
    cuBLAS' workspaces."""
    assert 5 * WEIGHTS < peak(tmp_path, REPLICAS) < 5 * WEIGHTS + 2**25


def test_shards_hold_an_eighth(tmp_path: Path) -> None:
    """Of weights, gradients and states; a few layers are whole for a while."""
    assert 4 * WEIGHTS / 8 < peak(tmp_path, SHARDS) < 4 * WEIGHTS / 8 + 8 * WEIGHTS / 16 + 2**24


def test_a_rank_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(InputError, match="rank 8 does not exist"):
        trace(tmp_path / "train.py", ranks=8, rank=8)


@pytest.mark.parametrize(
    ("words", "subject", "ranks", "own"),
    [
        ("torchrun --nproc-per-node 8 train.py --lr 1", "train.py", "8", "--lr 1"),
        ("torchrun --nnodes=2 --nproc_per_node=4 train.py", "train.py", "8", ""),
        ("accelerate launch --num_processes 2 a/train.py x", "a/train.py", "2", "x"),
        (
            "deepspeed --num_gpus=4 train.py --deepspeed x",
            "train.py",
            "4",
            "--deepspeed x",
        ),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", "train.py", "2", ""),
        ("python -m package.train --gpu 0", "-m package.train", "", "--gpu 0"),
        ("python train.py -m x", "train.py", "", "-m x"),
    ],
)
def test_launchers(words: str, subject: str, ranks: str, own: str) -> None:
    told = split(["--gpu", "t4", "--", *words.split()], {"--gpu": True})
    assert told.subject == subject
    assert told.ours == ["--gpu", "t4", *(["--ranks", ranks] if ranks else [])]
    assert told.arguments == own.split()
