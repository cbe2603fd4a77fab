"""Gradient checkpointing by the model's own switch."""

import torch
from model import batches, build

model = build(torch.bfloat16).to("cuda:0").train()
model.gradient_checkpointing_enable({"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for batch in batches(4):
    loss = model(**{name: value.to(0) for name, value in batch.items()}, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
