"""In the order of TRL's kto.py: answers with a label each, a reference model."""

from datasets import Dataset
from tiny import ARGUMENTS, model, text, tokenizer

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
training_args = KTOConfig(**ARGUMENTS)
trainer = KTOTrainer(
    model(), model(), args=training_args, train_dataset=dataset, processing_class=tokenizer()
)
trainer.train()
trainer.save_model(training_args.output_dir)
