"""In the order of TRL's sft.py: a data set of texts, a tokenizer, SFTTrainer, a model saved."""

from datasets import Dataset
from tiny import model, text, tokenizer
from trl import SFTConfig, SFTTrainer

dataset = Dataset.from_dict({"text": [text(160, start=4 + row) for row in range(64)]})
split = dataset.train_test_split(test_size=0.1, seed=0)
training_args = SFTConfig(
    output_dir="out",
    max_length=128,
    per_device_train_batch_size=8,
    gradient_checkpointing=False,
    max_steps=3,
    bf16=False,
    report_to="none",
)
trainer = SFTTrainer(
    model=model(),
    args=training_args,
    train_dataset=split["train"],
    eval_dataset=split["test"],
    processing_class=tokenizer(),
)
trainer.train()
trainer.save_model(training_args.output_dir)
