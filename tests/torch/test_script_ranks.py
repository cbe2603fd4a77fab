"""Scripts as one rank of several: what each holds is what the same layout holds by hand."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from memfit.api.verbs import trace
from memfit.cli.trace import split
from memfit.errors import InputError
from memfit.trace.launchers import counts

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

model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
with torch.cuda.Stream() as stream:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    end.record()
assert start.elapsed_time(end) >= 0
"""
SHARDS = """
from torch.distributed.fsdp import fully_shard

for layer in model:
    fully_shard(layer)
fully_shard(model)
"""
FLAT = """
import functools
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
model = FSDP(model, auto_wrap_policy=policy, mixed_precision=half,
             device_id=torch.cuda.current_device(), use_orig_params=True)
"""
ZERO = """
import deepspeed, os, torch
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": STAGE, "reduce_bucket_size": 500000, "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
    },
}
deepspeed.init_distributed()
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(16)])
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(3):
    given = torch.randn(4, 512, device=engine.device, dtype=torch.bfloat16)
    loss = engine(given).square().mean()
    engine.backward(loss)
    engine.step()
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
RUN = "python -m torch.distributed.run"
WEIGHTS = 16 * 512 * 512 * 4


def peak(folder: Path, wrap: str, weights: int = WEIGHTS) -> int:
    script = folder / "train.py"
    script.write_text(HEAD + wrap + STEPS)
    found = trace(script, gpu="a100-sxm-80gb", ranks=8, rank=3)
    assert found.script is not None
    assert found.script.steps == 3
    assert found.strategy.ranks == 8
    assert found.memory.parts["weights"] == weights
    return found.memory.allocated


def test_replicas_hold_everything_and_buckets(tmp_path: Path) -> None:
    """Weights, gradients, DDP's buckets (gradients are no views of them) and two states, beside
    cuBLAS' workspaces."""
    assert 5 * WEIGHTS < peak(tmp_path, REPLICAS) < 5 * WEIGHTS + 2**25


def test_shards_hold_an_eighth(tmp_path: Path) -> None:
    """Of weights, gradients and states; a few layers are whole for a while."""
    assert (
        4 * WEIGHTS / 8
        < peak(tmp_path, SHARDS, WEIGHTS // 8)
        < 4 * WEIGHTS / 8 + 8 * WEIGHTS / 16 + 2**24
    )


def test_flat_shards_hold_an_eighth(tmp_path: Path) -> None:
    """FSDP1: the same, and a layer's gathered weights and gradients in 16 bits."""
    assert (
        4 * WEIGHTS / 8
        < peak(tmp_path, FLAT, WEIGHTS // 8)
        < 4 * WEIGHTS / 8 + 4 * WEIGHTS / 16 + 2**24
    )


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(("stage", "whole", "shared"), [(1, 4, 12), (2, 2, 14), (3, 0, 16)])
def test_zero_by_its_own_engine(tmp_path: Path, stage: int, whole: int, shared: int) -> None:
    """Bytes of each value on every rank and spread over all: bf16 weights and gradients, fp32
    copies and two states; beside them workspaces, a bucket and the step's fp32 gradients."""
    script = tmp_path / "train.py"
    script.write_text(ZERO.replace("STAGE", str(stage)))
    found = trace(script, gpu="a100-sxm-80gb", launcher="deepspeed --num_gpus 8")
    values = WEIGHTS // 4
    least = values * (whole + shared / 8)
    assert found.strategy.ranks == 8
    assert least < found.memory.allocated < 1.15 * least + 2**25


def test_a_rank_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(InputError, match="rank 8 does not exist"):
        trace(tmp_path / "train.py", ranks=8, rank=8)


@pytest.mark.parametrize(
    ("words", "subject", "launcher", "own"),
    [
        (
            "torchrun --nproc-per-node 8 train.py --lr 1",
            "train.py",
            "torchrun --nproc-per-node 8",
            "--lr 1",
        ),
        ("accelerate launch -m a.b x", "-m a.b", "accelerate launch", "x"),
        (
            "accelerate launch --config_file c.yaml a/train.py x",
            "a/train.py",
            "accelerate launch --config_file c.yaml",
            "x",
        ),
        ("python -m torch.distributed.run train.py", "train.py", RUN, ""),
        ("python -m package.train --gpu 0", "-m package.train", "", "--gpu 0"),
        ("python train.py -m x", "train.py", "", "-m x"),
        ("A=1 python train.py", "train.py", "A=1 python", ""),
        ("A=/b/c torchrun train.py x", "train.py", "A=/b/c torchrun", "x"),
        ("frobrun train.py", "train.py", "frobrun", ""),
        ("torchrun", "", "torchrun", ""),
    ],
)
def test_launchers(words: str, subject: str, launcher: str, own: str) -> None:
    told = split(["--gpu", "t4", "--", *words.split()], {"--gpu": True})
    assert told == (subject, ["--gpu", "t4"], own.split(), launcher)


JOINS = """
import os, sys
import torch, torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

def work(rank, size, *_):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="12355")
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.cuda.set_device(rank)
    model = DDP(torch.nn.Linear(64, 64).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    dist.broadcast_object_list(found, src=0)
    dist.barrier()
    few = dist.new_group([rank, (rank + 1) % size], backend="gloo")
    assert len(found) == dist.get_world_size() == size and dist.get_world_size(few) == 2
    assert found[0] == {"rank": rank} and dist.get_backend() == "nccl"
    for _ in range(3):
        loss = model(torch.randn(4, 64, device=rank)).sum()
        assert loss.device == torch.device("cuda", rank)
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()

def load(number, queue):
    if mp.parent_process() is None:
        raise SystemExit("a loader of data runs as a rank")

class Job:
    def __init__(self, rank):
        work(rank, 4)

def run(rank):
    Job(rank)

if __name__ == "__main__":
"""
SECOND = """
import torch
import torch.multiprocessing as mp

def work(local):
    assert local == torch.cuda.current_device() == 1, local

if __name__ == "__main__":
    mp.spawn(work, nprocs=8)
"""
SPAWNS = "    mp.spawn(work, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())"
FORKS = """
    for given in "a queue", 1337:
        loader = mp.Process(target=load, args=(0, given))
        loader.start()
        loader.join(timeout=10)
    processes = []
    for rank in range(4):
        process = mp.Process(target=run, args=(rank,))
        process.start()
        processes.append(process)
        process.join(timeout=10)
    assert [one.exitcode for one in processes] == [0] * 4
    assert not any(one.is_alive() for one in processes)
"""
LAUNCHED = "    work(int(os.environ['LOCAL_RANK']), int(os.environ['WORLD_SIZE']))"


@pytest.mark.parametrize(
    ("start", "given", "rank"),
    [
        (SPAWNS, {"ranks": 4, "rank": 3}, 3),
        (SPAWNS, {"gpu": "4xa100-sxm-80gb"}, 0),
        (FORKS, {"rank": 2}, 2),
        (LAUNCHED, {"launcher": "torchrun --standalone --nproc_per_node 4"}, 0),
        (LAUNCHED, {"launcher": "torchrun --nproc_per_node=gpu", "gpu": "4xa100-sxm-80gb"}, 0),
        (LAUNCHED, {"launcher": "mpirun -np 4 python", "rank": 2}, 2),
        (LAUNCHED, {"launcher": "srun -n4 python", "rank": 1}, 1),
        (LAUNCHED, {"launcher": "srun --ntasks-per-node=4 -N 1 python", "rank": 1}, 1),
        (LAUNCHED, {"launcher": "accelerate launch --multi_gpu --num_processes 4", "rank": 1}, 1),
    ],
)
def test_every_way_to_start(tmp_path: Path, start: str, given: Any, rank: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(JOINS + start)
    found = trace(script, **{"gpu": "a100-sxm-80gb", **given})
    assert found.script is not None
    assert found.script.steps == 3
    assert (found.strategy.ranks, found.strategy.rank) == (4, rank)


@pytest.mark.parametrize(
    ("launcher", "given", "said"),
    [
        ("torchrun --bogus 3", {}, "`torchrun` did not accept its options"),
        ("torchrun --nproc-per-node=two", {}, "options: Unsupported nproc_per_node value: two"),
        ("mpirun -np 0 python", {}, "`mpirun` did not accept its options: `-np` is `0`"),
        ("mpirun python", {}, "`mpirun` does not say how many processes it starts"),
        ("torchrun -m", {}, r"no module `.*train\.py` is found"),
        ("frobrun", {}, "`frobrun` is neither a launcher nor a command"),
        ("", {"rank": 3}, "rank 3 does not exist: the script runs as one process"),
    ],
)
def test_what_a_launcher_does_not_accept(
    tmp_path: Path, launcher: str, given: dict[str, Any], said: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    with pytest.raises(InputError, match=said):
        trace(script, launcher=launcher, steps=0, **given)


LATER = """
import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1023), torch.nn.Linear(1023, 1024))
for layer in model:
    fully_shard(layer)
fully_shard(model)
assert torch.cuda.memory_allocated() == 0
assert model[0].weight.device.type == "meta"
model.to_empty(device="cuda")
sharded = sum(one.to_local().nbytes for one in model.parameters())
assert 0 <= torch.cuda.memory_allocated() - sharded < 8192
assert model[0].weight.to_local().untyped_storage().nbytes() == 128 * 1024 * 4
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(2, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("rank", [0, 7])  # the last one has a row less, which FSDP2 pads
def test_shards_of_a_model_without_memory(tmp_path: Path, rank: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(LATER)
    found = trace(script, gpu="a100-sxm-80gb", ranks=8, rank=rank, steps=2)
    assert found.script is not None
    whole = 1024 * 1024 * 4  # one of the two matrices
    assert 2 * whole / 8 < found.memory.parts["weights"] < 2 * whole / 8 + 64 * 1024


def test_numbers_of_processes() -> None:
    assert counts("srun", ["--ntasks-per-node=4", "--nodes=2"]) == (8, 4)
    assert counts("srun", ["-N2", "-n", "8"]) == (8, 4)
    assert counts("srun", ["--nodes", "3"]) == (3, 1)
    assert counts("mpirun", ["-np", "16", "-ppn", "4"]) == (16, 4)
    assert counts("mpirun", ["-n", "12"]) == (12, 12)


def test_a_second_machine_starts_its_own_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SECOND)
    trace(script, ranks=16, rank=9, steps=0)
