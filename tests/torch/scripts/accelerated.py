"""accelerate's loop in mixed precision."""

import torch
from accelerate import Accelerator
from model import Tokens, build

accelerator = Accelerator(mixed_precision="bf16")
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = torch.utils.data.DataLoader(
    Tokens(), batch_size=2, shuffle=True, num_workers=2, pin_memory=True
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for epoch in range(100):
    for batch in loader:
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(loss.item())
