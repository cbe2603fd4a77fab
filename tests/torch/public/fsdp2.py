# memfit: torchrun --nproc_per_node 2 -- --mixed-precision
"""In the order of pytorch/examples' FSDP2: made on `meta`, sharded layer by layer, mixed precision
and explicit prefetching as options, state dicts gathered on rank 0."""

import argparse
import os

import torch.distributed as dist
from blocks import GPT
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import torch


def prefetch(model, count):
    layers = model.layers
    for place, one in enumerate(layers):
        one.set_modules_to_forward_prefetch(list(layers[place + 1 : place + 1 + count]))
        one.set_modules_to_backward_prefetch(
            [layers[place - step] for step in range(1, count + 1) if place >= step]
        )


def main(args):
    rank = int(os.environ["LOCAL_RANK"])
    if torch.accelerator.is_available():
        device = torch.device(f"{torch.accelerator.current_accelerator()}:{rank}")
        torch.accelerator.set_device_index(rank)
        backend = torch.distributed.get_default_backend_for_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(backend=backend)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(words=1024, length=128, width=256, layers=4)
    given = {}
    if args.mixed_precision:
        given["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for one in model.layers:
        fully_shard(one, **given)
    fully_shard(model, **given)
    assert isinstance(model, FSDPModule)
    assert all(isinstance(one, DTensor) for one in model.parameters())
    assert model.wpe.weight.placements == (Shard(0),)
    if args.explicit_prefetching:
        prefetch(model, 2)
    model.to_empty(device=device)
    model.apply(model.init)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(4):
        if args.explicit_prefetching:
            model.unshard()
        ids = torch.randint(0, 1024, (16, 128), device=device)
        loss = model(ids, ids)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    kept = get_model_state_dict(model, options=options)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save(kept, "model_state_dict.pt")
        torch.save(states, "optim_state_dict.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PyTorch FSDP2 example")
    parser.add_argument("--explicit-prefetching", action="store_true", default=False)
    parser.add_argument("--mixed-precision", action="store_true", default=False)
    main(parser.parse_args())
