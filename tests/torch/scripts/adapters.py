"""LoRA by PEFT on a bf16 model."""

import torch
from model import batches, build
from peft import LoraConfig, get_peft_model

model = build(torch.bfloat16).to("cuda")
model = get_peft_model(
    model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
)
model.print_trainable_parameters()
model.train()
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4)
for batch in batches(2):
    loss = model(**{name: value.to("cuda") for name, value in batch.items()}, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
