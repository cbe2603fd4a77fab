"""A training loop as anybody might write it: nothing here knows of memfit."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--device", default="cuda")
options = parser.parse_args()

width, depth, words = 2048, 12, 32000
model = nn.Sequential(
    nn.Embedding(words, width),
    *(
        nn.TransformerEncoderLayer(
            width, 16, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(depth)
    ),
    nn.Linear(width, words),
).to(options.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(10_000):
    tokens = torch.randint(0, words, (options.batch, 513), device=options.device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated())
torch.save(model.state_dict(), "model.pt")
