"""In the order of TRL's reward_modeling.py: one label for each sequence, pairs of answers."""

from datasets import Dataset
from tiny import ARGUMENTS, model, text, tokenizer
from trl import RewardConfig, RewardTrainer

rows = range(48)
dataset = Dataset.from_dict(
    {
        "chosen": [text(120, start=4 + row) for row in rows],
        "rejected": [text(120, start=300 + row) for row in rows],
    }
)
training_args = RewardConfig(**ARGUMENTS)
trainer = RewardTrainer(
    model=model(labels=1), args=training_args, train_dataset=dataset, processing_class=tokenizer()
)
trainer.train()
trainer.save_model(training_args.output_dir)
