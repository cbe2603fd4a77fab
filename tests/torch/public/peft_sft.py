"""In the order of PEFT's sft example: a model of the hub in 4 bits, adapters from the trainer's
peft_config, gradient checkpointing, a chat template."""

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(100)
name = "Qwen/Qwen2.5-0.5B-Instruct"
bnb_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.bfloat16,
    bnb_4bit_use_double_quant=True,
    bnb_4bit_quant_storage=torch.uint8,
)
model = AutoModelForCausalLM.from_pretrained(
    name, quantization_config=bnb_config, dtype=torch.bfloat16, attn_implementation="sdpa"
)
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
tokenizer.pad_token = tokenizer.eos_token
training_args = SFTConfig(
    output_dir="out",
    max_length=256,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": True},
    bf16=True,
    max_steps=3,
    optim="paged_adamw_32bit",
    report_to="none",
)
model.config.use_cache = not training_args.gradient_checkpointing
data = load_dataset("smangrul/ultrachat-10k-chatml")
data = data.map(
    lambda rows: {
        "text": [tokenizer.apply_chat_template(one, tokenize=False) for one in rows["messages"]]
    },
    batched=True,
    remove_columns=data["train"].column_names,
)
peft_config = LoraConfig(
    r=8,
    lora_alpha=16,
    lora_dropout=0.1,
    bias="none",
    task_type="CAUSAL_LM",
    target_modules="all-linear",
)
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    args=training_args,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    peft_config=peft_config,
)
trainer.model.print_trainable_parameters()
trainer.train()
trainer.save_model()
