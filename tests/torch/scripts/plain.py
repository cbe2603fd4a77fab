"""A loop by hand: pure bf16, AdamW, clipping, what the GPU says printed."""

import argparse

import torch
from model import batches, build

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=2)
options = parser.parse_args()

assert torch.cuda.is_available()
device = torch.device("cuda")
print(
    torch.cuda.get_device_name(0),
    torch.cuda.get_device_properties(0).total_memory,
    torch.cuda.is_bf16_supported(),
)
model = build(torch.bfloat16).to(device)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
torch.cuda.reset_peak_memory_stats()
for step, batch in enumerate(batches(options.batch)):
    batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    print(f"step {step}: loss {loss.item():.3f}, {torch.cuda.max_memory_allocated()} bytes")
    if step == 1000:
        break
