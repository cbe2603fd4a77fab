"""transformers' Trainer with evaluation, checkpoints, accumulation, gradient checkpointing and a
compiler that is left out."""

from model import Tokens, build
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir="never-written",
    per_device_train_batch_size=2,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    max_steps=2,
    eval_strategy="steps",
    eval_steps=2,
    save_steps=1,
    save_total_limit=1,
    load_best_model_at_end=False,
    torch_compile=True,
    dataloader_num_workers=2,
    dataloader_persistent_workers=True,
    report_to="none",
)
trainer = Trainer(model=build(), args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())
trainer.train()
trainer.save_model("never-written/last")
trainer.model.save_pretrained("never-written/again")
