"""In the order of nanochat's base_train.py: a model made on `meta`, Muon beside AdamW, bits per
byte and a sample before the first step, schedules for both optimizers."""

import math
import os
import sys
import time

import torch.distributed as dist
from torch.nn import functional as F

import torch
from torch import nn

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
depth, words, length, heads = 2, 2048, 128, 4
width = depth * 64
device_batch_size, total_batch_size, steps, eval_tokens = 4, 1024, 3, 4096
kind = torch.float32 if "--float32" in sys.argv else torch.bfloat16
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(42)
torch.set_float32_matmul_precision("high")


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=3)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], 3).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_q, self.c_k, self.c_v, self.c_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x, cos, sin):
        y, (rows, count, _) = norm(x), x.size()
        q, k, v = (one(y).view(rows, count, heads, -1) for one in (self.c_q, self.c_k, self.c_v))
        q, k = norm(rotated(q, cos, sin)), norm(rotated(k, cos, sin))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(rows, count, -1))
        return x + self.c_out(F.relu(self.c_fc(norm(x))).square())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.lm_head = nn.Linear(width, words, bias=False)
        for name, one in zip(("cos", "sin"), self.rotary("meta"), strict=True):
            self.register_buffer(name, one, persistent=False)

    def rotary(self, where):
        size = width // heads
        rates = 1.0 / 10000 ** (torch.arange(0, size, 2, dtype=torch.float32, device=where) / size)
        angles = torch.outer(torch.arange(length * 2, dtype=torch.float32, device=where), rates)
        return (one.to(kind)[None, :, None, :] for one in (angles.cos(), angles.sin()))

    def init_weights(self):
        for one in self.parameters():
            nn.init.normal_(one, std=1.0 / math.sqrt(one.size(-1)))
        nn.init.zeros_(self.lm_head.weight)
        self.cos, self.sin = self.rotary(self.wte.weight.device)
        self.wte.to(dtype=kind)

    def forward(self, ids, targets=None, reduction="mean"):
        x = norm(self.wte(ids))
        cos, sin = self.cos[:, : ids.size(1)], self.sin[:, : ids.size(1)]
        for one in self.blocks:
            x = one(x, cos, sin)
        logits = self.lm_head(norm(x))
        logits = 15 * torch.tanh(logits / 15)
        if targets is None:
            return logits
        flat = logits.float().view(-1, logits.size(-1))
        return F.cross_entropy(flat, targets.view(-1), ignore_index=-1, reduction=reduction)


def orthogonal(gradient, rounds):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient.bfloat16()
    if gradient.size(-2) > gradient.size(-1):
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return x.mT if gradient.size(-2) > gradient.size(-1) else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, rounds=5):
        params = list(params)
        groups = [
            {"params": [one for one in params if one.numel() == size]}
            for size in {one.numel() for one in params}
        ]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "rounds": rounds})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(one.grad)
                state["buffer"].lerp_(one.grad, 1 - group["momentum"])
                update = one.grad.lerp_(state["buffer"], group["momentum"])
                update = orthogonal(update, group["rounds"])
                scale = max(1, one.size(-2) / one.size(-1)) ** 0.5
                one.add_(update, alpha=-group["lr"] * scale)


def batches():
    while True:
        tokens = torch.randint(0, words, (device_batch_size * length + 1,))
        if device.type == "cuda":
            tokens = tokens.pin_memory()
        x = tokens[:-1].view(device_batch_size, length).to(device, non_blocking=True)
        yield x, tokens[1:].view(device_batch_size, length).to(device, non_blocking=True)


@torch.no_grad()
def bits_per_byte(model, loader, count, sizes):
    nats = torch.tensor(0.0, dtype=torch.float32, device=device)
    total = torch.tensor(0, dtype=torch.int64, device=device)
    for _ in range(count):
        x, y = next(loader)
        losses = model(x, y, reduction="none").view(-1)
        if (y.int() < 0).any():
            raise SystemExit("no target is negative")
        taken = sizes[y.view(-1)]
        nats += (losses * (taken > 0)).sum()
        total += taken.sum()
    if dist.is_initialized():
        dist.all_reduce(nats)
        dist.all_reduce(total)
    return nats.item() / (math.log(2) * total.item())


with torch.device("meta"):
    model = Model()
model.to_empty(device=device)
model.init_weights()
print(f"{sum(one.numel() for one in model.parameters()):,} parameters")
original, model = model, torch.compile(model, dynamic=False) if device.type == "cuda" else model
matrices = list(original.blocks.parameters())
adamw = torch.optim.AdamW(
    [{"params": original.lm_head.parameters(), "lr": 0.004}, {"params": original.wte.parameters()}],
    lr=0.2,
    betas=(0.8, 0.95),
    eps=1e-10,
    weight_decay=0.0,
    fused=True,
)
muon = Muon(matrices)
for group in adamw.param_groups + muon.param_groups:
    group["initial_lr"] = group["lr"]
context = torch.amp.autocast(device.type, dtype=kind, enabled=kind == torch.bfloat16)
sizes = torch.randint(1, 8, (words,), device=device)
loader = batches()
x, y = next(loader)
accumulation = total_batch_size // (device_batch_size * length)
smooth, best = 0.0, float("inf")
for step in range(steps + 1):
    if step % 2 == 0:
        model.eval()
        with context:
            found = bits_per_byte(model, batches(), eval_tokens // (x.numel()), sizes)
        best = min(best, found)
        ids = torch.randint(0, words, (1, 8), device=device)
        with torch.inference_mode(), context:
            for _ in range(4):
                logits = original(ids)[:, -1, :]
                ids = torch.cat((ids, torch.argmax(logits, dim=-1, keepdim=True)), dim=1)
        print(ids[0].tolist())
        model.train()
    if step == steps:
        os.makedirs("out", exist_ok=True)
        torch.save(original.state_dict(), "out/model.pt")
        break
    start = time.time()
    for _ in range(accumulation):
        with context:
            loss = model(x, y)
        kept = loss.detach()
        (loss / accumulation).backward()
        x, y = next(loader)
    torch.nn.utils.clip_grad_norm_(original.parameters(), 1.0)
    for group in adamw.param_groups + muon.param_groups:
        group["lr"] = group["initial_lr"] * (1 - step / (2 * steps))
    for one in (adamw, muon):
        one.step()
    model.zero_grad(set_to_none=True)
    smooth = 0.9 * smooth + 0.1 * kept.item()
    print(f"step {step}: {smooth / (1 - 0.9 ** (step + 1)):.4f}, {time.time() - start:.2f} s")
