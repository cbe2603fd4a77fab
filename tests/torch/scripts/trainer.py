"""transformers' Trainer, saving and evaluating on its way."""

from model import Tokens, build
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir="never-written",
    per_device_train_batch_size=2,
    num_train_epochs=100,
    bf16=True,
    logging_steps=1,
    save_steps=1,
    report_to="none",
)
trainer = Trainer(model=build(), args=arguments, train_dataset=Tokens())
trainer.train()
trainer.save_model("never-written/last")
