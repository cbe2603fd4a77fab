"""No training at all: a model that answers."""

import torch
from model import CONFIG, build

model = build(torch.bfloat16).to("cuda").eval()
prompt = torch.randint(0, CONFIG["vocab_size"], (4, 128), device="cuda")
out = model.generate(
    prompt,
    attention_mask=torch.ones_like(prompt),
    max_new_tokens=16,
    min_new_tokens=16,
    do_sample=False,
    pad_token_id=0,
)
assert out.shape == (4, 144)
print(out.tolist()[0][-1])
