"""In the order of TRL's GRPO quick start: completions sampled, rewarded by a function of the
script's own, learnt from."""

from datasets import Dataset
from tiny import model, text, tokenizer
from trl import GRPOConfig, GRPOTrainer


def reward_num_unique_letters(completions, **kwargs):
    return [
        float(len(set(one if isinstance(one, str) else one[0]["content"]))) for one in completions
    ]


dataset = Dataset.from_dict({"prompt": [text(24, start=4 + row) for row in range(64)]})
training_args = GRPOConfig(
    output_dir="out",
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=16,
    max_steps=3,
    gradient_checkpointing=False,
    bf16=False,
    report_to="none",
)
trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=reward_num_unique_letters,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
