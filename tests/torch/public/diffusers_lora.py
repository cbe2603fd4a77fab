"""In the order of diffusers' train_text_to_image_lora.py: frozen encoders in half precision, PEFT's
adapters in a denoiser, noise added to latents, accelerate's accumulation, adapters saved. The
networks are small ones of the same parts, written here."""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SIZE, WORDS, COUNT = 64, 512, 16


class Encoder(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.SiLU(), nn.Conv2d(width, width, 3, 2, 1), nn.SiLU()
        )
        self.out = nn.Conv2d(width, 8, 1)

    def sample(self, x):
        mean, deviation = self.out(self.down(x)).chunk(2, dim=1)
        return mean + torch.exp(0.5 * deviation.clamp(-30, 20)) * torch.randn_like(mean)


class Attention(nn.Module):
    def __init__(self, width, context):
        super().__init__()
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k, self.to_v = (nn.Linear(context, width, bias=False) for _ in range(2))
        self.to_out = nn.Linear(width, width)

    def forward(self, x, context):
        shape = (x.size(0), -1, 4, x.size(-1) // 4)
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        q, k, v = (one.view(shape).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.to_out(y.transpose(1, 2).reshape(x.shape))


class Denoiser(nn.Module):
    def __init__(self, width=128, context=64):
        super().__init__()
        self.width = width
        self.conv_in, self.conv_out = nn.Conv2d(4, width, 3, 1, 1), nn.Conv2d(width, 4, 3, 1, 1)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(3))
        self.attentions = nn.ModuleList(Attention(width, context) for _ in range(3))

    def forward(self, x, steps, context):
        half = self.width // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / half)
        angles = steps[:, None].float() * rates[None]
        emb = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype))
        x = self.conv_in(x)
        for norm, conv, attention in zip(self.norms, self.convs, self.attentions, strict=True):
            x = x + conv(F.silu(norm(x) + emb[:, :, None, None]))
            flat = x.flatten(2).transpose(1, 2)
            x = attention(flat, context).transpose(1, 2).reshape(x.shape)
        return self.conv_out(x)


class Pairs(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, place):
        return {
            "pixel_values": torch.randn(3, SIZE, SIZE),
            "input_ids": torch.randint(0, WORDS, (COUNT,)),
        }


def collate(rows):
    pixels = torch.stack([one["pixel_values"] for one in rows])
    pixels = pixels.to(memory_format=torch.contiguous_format).float()
    return {"pixel_values": pixels, "input_ids": torch.stack([one["input_ids"] for one in rows])}


def main():
    accelerator = Accelerator(
        gradient_accumulation_steps=1, project_config=ProjectConfiguration(project_dir="out")
    )
    set_seed(1337)
    text_encoder, vae, unet = nn.Embedding(WORDS, 64), Encoder(), Denoiser()
    for one in (text_encoder, vae, unet):
        one.requires_grad_(False)
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(
        accelerator.mixed_precision, torch.float32
    )
    lora = LoraConfig(
        r=4,
        lora_alpha=4,
        init_lora_weights="gaussian",
        target_modules=["to_k", "to_q", "to_v", "to_out"],
    )
    for one in (unet, vae, text_encoder):
        one.to(accelerator.device, dtype=kind)
    inject_adapter_in_model(lora, unet)
    layers = [one for one in unet.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(layers, lr=1e-4)
    loader = DataLoader(Pairs(), shuffle=True, collate_fn=collate, batch_size=8)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    unet, optimizer, loader, scheduler = accelerator.prepare(unet, optimizer, loader, scheduler)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 2e-2, 1000), 0).to(accelerator.device)
    unet.train()
    for step, batch in enumerate(loader):
        with accelerator.accumulate(unet):
            latents = vae.sample(batch["pixel_values"].to(dtype=kind)) * 0.18215
            noise = torch.randn_like(latents)
            times = torch.randint(0, 1000, (latents.shape[0],), device=latents.device).long()
            scale = alphas[times].view(-1, 1, 1, 1)
            noisy = scale.sqrt() * latents + (1 - scale).sqrt() * noise
            states = text_encoder(batch["input_ids"])
            found = unet(noisy, times, states)
            loss = F.mse_loss(found.float(), noise.float(), reduction="mean")
            average = accelerator.gather(loss.repeat(8)).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(layers, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print(f"step {step}: {average.item():.4f}")
        if step == 3:
            break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unet = accelerator.unwrap_model(unet).to(torch.float32)
        torch.save(get_peft_model_state_dict(unet), "pytorch_lora_weights.bin")
    accelerator.end_training()


if __name__ == "__main__":
    main()
