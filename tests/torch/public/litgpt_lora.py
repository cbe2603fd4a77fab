"""In the order of LitGPT's finetune/lora.py: only adapters learn, logits in chunks."""

import lightning as L
import torch
from litgpt.lora import GPT, Config, lora_filter, mark_only_lora_as_trainable
from litgpt.utils import chunked_cross_entropy, num_parameters, CycleIterator

fabric = L.Fabric(devices=1, strategy="auto", precision="bf16-true", plugins=None)
fabric.launch()
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
    lora_r=8,
    lora_alpha=16,
    lora_dropout=0.05,
    lora_query=True,
    lora_value=True,
)
with fabric.init_module(empty_init=False):
    model = GPT(config)
mark_only_lora_as_trainable(model)
fabric.print(num_parameters(model, requires_grad=True))
model = fabric.setup_module(model)
optimizer = fabric.setup_optimizers(
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
)
model.max_seq_length = 128
loader = CycleIterator(
    fabric.setup_dataloaders(
        torch.utils.data.DataLoader(
            [
                {
                    "input_ids": torch.randint(0, 2000, (128,)),
                    "labels": torch.randint(0, 2000, (128,)),
                }
                for _ in range(16)
            ],
            batch_size=4,
        )
    )
)
for step in range(4):
    batch = next(loader)
    logits = model(batch["input_ids"], lm_head_chunk_size=32)
    logits[-1] = logits[-1][..., :-1, :]
    loss = chunked_cross_entropy(logits, batch["labels"][..., 1:])
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
fabric.save("out/lora.pth", {"model": model}, filter={"model": lora_filter})
