"""fp16 autocast with a gradient scaler and accumulation."""

import torch
from model import batches, build

model = build().cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
data = batches(2)
for _ in range(1000):
    for _ in range(2):
        batch = {name: value.cuda() for name, value in next(data).items()}
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch, use_cache=False).loss / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
