"""In the order of nanoGPT's train.py: a memory map of tokens, losses estimated without gradients,
a decayed AdamW, accumulation, a checkpoint; alone or as one of torchrun's ranks."""

import contextlib
import math
import os
import time

import numpy as np
from blocks import GPT
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

import torch

out_dir, eval_interval, eval_iters, log_interval = "out", 2, 8, 1
batch_size, block_size, gradient_accumulation_steps = 8, 128, 2
learning_rate, weight_decay, betas, grad_clip = 6e-4, 1e-1, (0.9, 0.95), 1.0
warmup_iters, lr_decay_iters, min_lr, max_iters = 2, 10, 6e-5, 4
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype, compiles = "float32", device == "cuda"

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="nccl" if device == "cuda" else "gloo")
    local = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        device = f"cuda:{local}"
        torch.cuda.set_device(device)
    master = int(os.environ["RANK"]) == 0
    offset = int(os.environ["RANK"])
    gradient_accumulation_steps = max(
        1, gradient_accumulation_steps // int(os.environ["WORLD_SIZE"])
    )
else:
    master, offset = True, 0
if master:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + offset)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
kind = "cuda" if "cuda" in device else "cpu"
context = (
    contextlib.nullcontext()
    if kind == "cpu" or dtype == "float32"
    else torch.amp.autocast(device_type=kind, dtype=getattr(torch, dtype))
)
np.random.randint(0, 2048, 100_000).astype(np.uint16).tofile(os.path.join(out_dir, "train.bin"))


def get_batch(split):
    data = np.memmap(os.path.join(out_dir, "train.bin"), dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch_size,))
    x, y = (
        torch.stack(
            [
                torch.from_numpy(data[one + shift : one + shift + block_size].astype(np.int64))
                for one in starts
            ]
        )
        for shift in (0, 1)
    )
    if kind == "cuda":
        return (one.pin_memory().to(device, non_blocking=True) for one in (x, y))
    return x.to(device), y.to(device)


model = GPT(length=block_size)
model.to(device)
scaler = torch.amp.GradScaler(kind, enabled=dtype == "float16")
named = {name: one for name, one in model.named_parameters() if one.requires_grad}
groups = [
    {"params": [one for one in named.values() if one.dim() >= 2], "weight_decay": weight_decay},
    {"params": [one for one in named.values() if one.dim() < 2], "weight_decay": 0.0},
]
more = {"fused": True} if kind == "cuda" else {}
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, **more)
if compiles:
    model = torch.compile(model)
if ddp:
    model = DDP(model, device_ids=[local] if kind == "cuda" else None)


@torch.no_grad()
def estimate_loss():
    found = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for step in range(eval_iters):
            x, y = get_batch(split)
            with context:
                _, loss = model(x, y)
            losses[step] = loss.item()
        found[split] = losses.mean()
    model.train()
    return found


def get_lr(step):
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    ratio = (step - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


x, y = get_batch("train")
clock, best, raw = time.time(), 1e9, model.module if ddp else model
for step in range(max_iters + 1):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    if step % eval_interval == 0 and master:
        losses = estimate_loss()
        print(f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best and step > 0:
            best = losses["val"]
            kept = {"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(kept, os.path.join(out_dir, "ckpt.pt"))
    for micro in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro == gradient_accumulation_steps - 1
        with context:
            _, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
        x, y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % log_interval == 0 and master:
        print(f"iter {step}: loss {loss.item():.4f}, time {time.time() - clock:.2f} s")
        clock = time.time()
if ddp:
    destroy_process_group()
