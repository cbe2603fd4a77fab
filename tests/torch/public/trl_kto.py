"""In the order of TRL's kto.py: answers with a label each, a reference model."""

from datasets import Dataset
from tiny import model, text, tokenizer

try:
    from trl import KTOConfig, KTOTrainer
except ImportError:  # where it has moved to
    from trl.experimental.kto import KTOConfig, KTOTrainer

rows = range(48)
dataset = Dataset.from_dict(
    {
        "prompt": [text(40, start=4 + row) for row in rows],
        "completion": [" " + text(60, start=100 + row) for row in rows],
        "label": [row % 2 == 0 for row in rows],
    }
)
training_args = KTOConfig(
    output_dir="out",
    per_device_train_batch_size=4,
    max_length=128,
    max_steps=3,
    gradient_checkpointing=False,
    bf16=False,
    report_to="none",
)
trainer = KTOTrainer(
    model(), model(), args=training_args, train_dataset=dataset, processing_class=tokenizer()
)
trainer.train()
trainer.save_model(training_args.output_dir)
