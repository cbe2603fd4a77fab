"""In the order of Unsloth's notebooks, with transformers' kernels: a 4-bit model, adapters on all
projections, checkpoints that keep their input on the CPU, TRL with an 8-bit optimizer."""

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

max_seq_length, name = 256, "unsloth/Llama-3.2-1B-Instruct"


class FastLanguageModel:
    @staticmethod
    def from_pretrained(model_name, max_seq_length, dtype, load_in_4bit):
        quantized = BitsAndBytesConfig(
            load_in_4bit=load_in_4bit,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        model = AutoModelForCausalLM.from_pretrained(
            model_name, quantization_config=quantized, device_map={"": 0}, dtype=dtype or "auto"
        )
        tokenizer = AutoTokenizer.from_pretrained(model_name, model_max_length=max_seq_length)
        return model, tokenizer

    @staticmethod
    def get_peft_model(model, r, target_modules, lora_alpha, use_gradient_checkpointing):
        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=bool(use_gradient_checkpointing)
        )
        lora = LoraConfig(
            r=r, lora_alpha=lora_alpha, target_modules=target_modules, task_type="CAUSAL_LM"
        )
        return get_peft_model(model, lora)


model, tokenizer = FastLanguageModel.from_pretrained(
    model_name=name, max_seq_length=max_seq_length, dtype=None, load_in_4bit=True
)
model = FastLanguageModel.get_peft_model(
    model,
    r=16,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha=16,
    use_gradient_checkpointing="unsloth",
)
prompt = "Below is an instruction.\n\n### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n{}"


def formatting_prompts_func(rows):
    parts = zip(rows["instruction"], rows["input"], rows["output"], strict=True)
    return {"text": [prompt.format(*one) + tokenizer.eos_token for one in parts]}


dataset = load_dataset("yahma/alpaca-cleaned", split="train")
dataset = dataset.map(formatting_prompts_func, batched=True)
dataset = dataset.remove_columns(["instruction", "input", "output"])
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=dataset,
    args=SFTConfig(
        dataset_text_field="text",
        max_length=max_seq_length,
        packing=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        warmup_steps=5,
        max_steps=3,
        learning_rate=2e-4,
        bf16=torch.cuda.is_bf16_supported(),
        optim="adamw_8bit",
        weight_decay=0.01,
        output_dir="outputs",
        report_to="none",
    ),
)
properties = torch.cuda.get_device_properties(0)
start = round(torch.cuda.max_memory_reserved() / 1024**3, 3)
print(
    f"GPU = {properties.name}. {start} GB of {properties.total_memory / 1024**3:.3f} GB reserved."
)
stats = trainer.train()
print(f"{stats.metrics['train_runtime']} s, {torch.cuda.max_memory_reserved() / 1024**3:.3f} GB")
model.save_pretrained("lora_model")
tokenizer.save_pretrained("lora_model")
