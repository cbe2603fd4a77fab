"""torch.compile, by function, by decorator and in place; evaluation between the steps, and a
checkpoint written and kept."""

import torch
from model import batches, build

model = build(torch.bfloat16).cuda()
model.compile()
step = torch.compile(lambda **batch: model(**batch, use_cache=False).loss, mode="max-autotune")


@torch.compile(fullgraph=True)
def scaled(loss):
    return loss * 1.0


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for number, batch in enumerate(batches(2)):
    batch = {name: value.cuda() for name, value in batch.items()}
    model.train()
    scaled(step(**batch)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        correct = (
            (model(**batch, use_cache=False).logits.argmax(-1) == batch["labels"])
            .float()
            .mean()
            .item()
        )
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number},
        f"step-{number}.pt",
    )
    print(f"step {number}: {correct:.2%}")
