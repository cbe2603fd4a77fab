# memfit: -- --model_name_or_path bert-base-cased --task_name mrpc --do_train --do_eval --max_seq_length 128 --max_steps 3 --per_device_train_batch_size 8 --output_dir out --report_to none
"""In the order of transformers' run_glue.py: labels from the data set, a model for sequences with
as many, padding to one length, a metric of `evaluate`. `--tiny` makes its model and data."""

from dataclasses import dataclass, field
from typing import Optional

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

KEYS = {
    "mrpc": ("sentence1", "sentence2"),
    "sst2": ("sentence", None),
    "stsb": ("sentence1", "sentence2"),
}


@dataclass
class Arguments:
    model_name_or_path: str = "bert-base-cased"
    task_name: Optional[str] = None
    max_seq_length: int = 128
    tiny: bool = field(default=False, metadata={"help": "a model and data of its own"})


def main():
    args, training_args = HfArgumentParser(
        (Arguments, TrainingArguments)
    ).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    if args.tiny:
        rows = {
            "input_ids": [[row % 500] * args.max_seq_length for row in range(64)],
            "attention_mask": [[1] * args.max_seq_length] * 64,
            "label": [row % 2 for row in range(64)],
        }
        part = Dataset.from_dict(rows).cast_column("label", ClassLabel(names=["no", "yes"]))
        data, tokenizer = DatasetDict({"train": part, "validation": part}), None
        small = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(**small, **rates, intermediate_size=512, vocab_size=1000, num_labels=2)
        model = BertForSequenceClassification(config)
    else:
        data = load_dataset("glue", args.task_name)
        labels = data["train"].features["label"].names
        config = AutoConfig.from_pretrained(
            args.model_name_or_path, num_labels=len(labels), finetuning_task=args.task_name
        )
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, use_fast=True)
        model = AutoModelForSequenceClassification.from_pretrained(
            args.model_name_or_path, config=config, ignore_mismatched_sizes=False
        )
        model.config.label2id = {one: place for place, one in enumerate(labels)}
        model.config.id2label = dict(enumerate(labels))
        first, second = KEYS[args.task_name]

        def preprocess(rows):
            texts = (rows[first],) if second is None else (rows[first], rows[second])
            return tokenizer(
                *texts, padding="max_length", max_length=args.max_seq_length, truncation=True
            )

        with training_args.main_process_first(desc="dataset map pre-processing"):
            data = data.map(preprocess, batched=True)

    def compute_metrics(found: EvalPrediction):
        preds = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
        return {"accuracy": float((np.argmax(preds, axis=1) == found.label_ids).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=data["train"],
        eval_dataset=data["validation"].select(range(32)),
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    done = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", done.metrics)
    trainer.save_state()
    if training_args.do_eval:
        trainer.log_metrics("eval", trainer.evaluate(eval_dataset=data["validation"]))
    if not args.tiny:
        trainer.create_model_card(
            finetuned_from=args.model_name_or_path, tasks="text-classification"
        )


if __name__ == "__main__":
    main()
