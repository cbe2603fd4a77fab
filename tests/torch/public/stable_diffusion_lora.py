"""In the order of diffusers' train_text_to_image_lora.py, with its own Stable Diffusion by name."""

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel, StableDiffusionPipeline
from diffusers.optimization import get_scheduler
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from transformers import CLIPTextModel, CLIPTokenizer

name = "stable-diffusion-v1-5/stable-diffusion-v1-5"
accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=1)
noise_scheduler = DDPMScheduler.from_pretrained(name, subfolder="scheduler")
tokenizer = CLIPTokenizer.from_pretrained(name, subfolder="tokenizer")
text_encoder = CLIPTextModel.from_pretrained(name, subfolder="text_encoder")
vae = AutoencoderKL.from_pretrained(name, subfolder="vae")
unet = UNet2DConditionModel.from_pretrained(name, subfolder="unet")
for one in (unet, vae, text_encoder):
    one.requires_grad_(False)
unet_lora_config = LoraConfig(
    r=4,
    lora_alpha=4,
    init_lora_weights="gaussian",
    target_modules=["to_k", "to_q", "to_v", "to_out.0"],
)
for one in (unet, vae, text_encoder):
    one.to(accelerator.device, dtype=torch.float16)
unet.add_adapter(unet_lora_config)
cast_training_params(unet, dtype=torch.float32)
lora_layers = [p for p in unet.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(lora_layers, lr=1e-4)
lr_scheduler = get_scheduler("constant", optimizer=optimizer)
unet, optimizer, lr_scheduler = accelerator.prepare(unet, optimizer, lr_scheduler)
for step in range(3):
    pixels = torch.randn(1, 3, 512, 512).to(accelerator.device)
    ids = tokenizer(
        ["a photo of a cat"],
        max_length=tokenizer.model_max_length,
        padding="max_length",
        truncation=True,
        return_tensors="pt",
    ).input_ids.to(accelerator.device)
    with accelerator.accumulate(unet):
        latents = (
            vae.encode(pixels.to(dtype=torch.float16)).latent_dist.sample()
            * vae.config.scaling_factor
        )
        noise = torch.randn_like(latents)
        timesteps = torch.randint(
            0, noise_scheduler.config.num_train_timesteps, (1,), device=latents.device
        ).long()
        noisy = noise_scheduler.add_noise(latents, noise, timesteps)
        states = text_encoder(ids, return_dict=False)[0]
        pred = unet(noisy, timesteps, states, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(pred.float(), noise.float())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(lora_layers, 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
state = get_peft_model_state_dict(accelerator.unwrap_model(unet))
StableDiffusionPipeline.save_lora_weights(
    save_directory="out", unet_lora_layers=state, safe_serialization=True
)
