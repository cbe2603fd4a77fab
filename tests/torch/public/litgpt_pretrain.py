"""In the order of LitGPT's pretrain.py: Fabric makes an empty model, accumulates and saves."""

import lightning as L
import torch
from litgpt.model import GPT, Config
from litgpt.utils import chunked_cross_entropy

fabric = L.Fabric(devices=1, strategy="auto", precision="bf16-true")
fabric.launch()
fabric.seed_everything(42)
config = Config(
    name="x",
    block_size=256,
    vocab_size=2000,
    padded_vocab_size=2048,
    n_layer=3,
    n_head=4,
    n_embd=256,
    rotary_percentage=1.0,
    parallel_residual=False,
    bias=False,
    norm_class_name="RMSNorm",
    mlp_class_name="LLaMAMLP",
    intermediate_size=768,
)
with fabric.init_module(empty_init=True):
    model = GPT(config)
model.apply(
    lambda m: (
        torch.nn.init.normal_(m.weight, std=0.02)
        if isinstance(m, (torch.nn.Linear, torch.nn.Embedding))
        else None
    )
)
model.max_seq_length = 128
model = torch.compile(model)
model = fabric.setup(model)
optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=4e-4,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    fused=fabric.device.type == "cuda",
)
optimizer = fabric.setup_optimizers(optimizer)
loader = fabric.setup_dataloaders(
    torch.utils.data.DataLoader([torch.randint(0, 2000, (129,)) for _ in range(32)], batch_size=4)
)
for step, batch in enumerate(loader):
    inputs, targets = batch[:, :128].contiguous().long(), batch[:, 1:129].contiguous().long()
    accumulating = (step + 1) % 2 != 0
    with fabric.no_backward_sync(model, enabled=accumulating):
        loss = chunked_cross_entropy(model(inputs), targets)
        fabric.backward(loss / 2)
    if not accumulating:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    fabric.print(step, loss.item())
fabric.save("out/lit_model.pth", {"model": model, "optimizer": optimizer})
