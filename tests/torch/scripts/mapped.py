"""A checkpoint of a folder, placed by device_map, quantized where the second argument says how;
LoRA by PEFT, transformers' Trainer."""

import sys

import torch
from model import DTYPE, Tokens
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

folder, quant = sys.argv[1:3]
packed = None
if quant == "nf4":
    packed = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )
elif quant == "int8":
    packed = BitsAndBytesConfig(load_in_8bit=True)
model = AutoModelForCausalLM.from_pretrained(
    folder, device_map="auto", **{DTYPE: torch.bfloat16}, quantization_config=packed
)
if packed is not None:
    model = prepare_model_for_kbit_training(
        model, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
model = get_peft_model(
    model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
)
arguments = TrainingArguments(
    output_dir="never-written",
    per_device_train_batch_size=2,
    gradient_checkpointing=packed is not None,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    bf16=True,
    optim="adamw_torch",
    max_grad_norm=0,
    report_to="none",
)
Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
