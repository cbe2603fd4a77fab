"""In the order of TRL's dpo.py: pairs of answers, a reference model beside the one that learns."""

from datasets import Dataset
from tiny import ARGUMENTS, model, text, tokenizer
from trl import DPOConfig, DPOTrainer

rows = range(48)
dataset = Dataset.from_dict(
    {
        "prompt": [text(40, start=4 + row) for row in rows],
        "chosen": [" " + text(80, start=100 + row) for row in rows],
        "rejected": [" " + text(80, start=300 + row) for row in rows],
    }
)
training_args = DPOConfig(**ARGUMENTS)
trainer = DPOTrainer(
    model(), model(), args=training_args, train_dataset=dataset, processing_class=tokenizer()
)
trainer.train()
metrics = trainer.evaluate(dataset.select(range(8)))
trainer.log_metrics("eval", metrics)
trainer.save_model(training_args.output_dir)
