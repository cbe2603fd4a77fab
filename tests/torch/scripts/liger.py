"""Liger's kernels in the model's place, with its fused linear loss: Triton, which is not run."""

import torch
from liger_kernel.transformers import apply_liger_kernel_to_llama
from model import batches, build

apply_liger_kernel_to_llama()
model = build(torch.bfloat16).cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for batch in batches(2):
    loss = model(**{name: value.cuda() for name, value in batch.items()}, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
