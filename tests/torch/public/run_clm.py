# memfit: -- --model_name_or_path gpt2 --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 --do_train --do_eval --block_size 128 --max_steps 3 --per_device_train_batch_size 4 --output_dir out --report_to none
"""In the order of transformers' run_clm.py: three dataclasses parsed, a data set split, tokenized
and grouped into blocks, the Trainer, metrics and perplexity. `--tiny` makes its model and data."""

import math
import os
import sys
from dataclasses import dataclass, field
from itertools import chain
from typing import Optional

import transformers
from datasets import Dataset, DatasetDict, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    model_name_or_path: Optional[str] = field(default=None)
    tiny: bool = field(default=False, metadata={"help": "a model and data of its own"})


@dataclass
class DataTrainingArguments:
    dataset_name: Optional[str] = field(default=None)
    dataset_config_name: Optional[str] = field(default=None)
    block_size: Optional[int] = field(default=None)
    max_eval_samples: Optional[int] = field(default=16)


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    transformers.utils.logging.set_verbosity(training_args.get_process_log_level())
    set_seed(training_args.seed)
    if model_args.tiny:
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=2048, **rates)
        model = AutoModelForCausalLM.from_config(config)
        ids = [[place * row % 2048 for place in range(600)] for row in range(1, 41)]
        part = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 600] * 40})
        tokenized, tokenizer = DatasetDict({"train": part, "validation": part}), None
    else:
        raw = load_dataset(data_args.dataset_name, data_args.dataset_config_name)
        if "validation" not in raw:
            raw["validation"] = load_dataset(data_args.dataset_name, split="train[:5%]")
        config = AutoConfig.from_pretrained(model_args.model_name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, use_fast=True)
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, config=config)
        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(tokenizer))
        names = list(raw["train"].features)
        text = "text" if "text" in names else names[0]
        with training_args.main_process_first(desc="dataset map tokenization"):
            tokenized = raw.map(
                lambda rows: tokenizer(rows[text]), batched=True, remove_columns=names
            )
    size = min(data_args.block_size or 1024, 1024)

    def group_texts(rows):
        joined = {name: list(chain(*rows[name])) for name in rows}
        total = len(joined[list(rows)[0]]) // size * size
        found = {
            name: [one[place : place + size] for place in range(0, total, size)]
            for name, one in joined.items()
        }
        found["labels"] = found["input_ids"].copy()
        return found

    with training_args.main_process_first(desc="grouping texts together"):
        grouped = tokenized.map(group_texts, batched=True)
    held = grouped["validation"]
    held = held.select(range(min(len(held), data_args.max_eval_samples)))

    def preprocess_logits_for_metrics(logits, labels):
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)

    def compute_metrics(found):
        preds, labels = found
        right = labels[:, 1:].reshape(-1) == preds[:, :-1].reshape(-1)
        return {"accuracy": float(right.mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=grouped["train"],
        eval_dataset=held,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    if training_args.do_train:
        done = trainer.train()
        trainer.save_model()
        trainer.log_metrics("train", {**done.metrics, "train_samples": len(grouped["train"])})
        trainer.save_metrics("train", done.metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        try:
            metrics["perplexity"] = math.exp(metrics["eval_loss"])
        except OverflowError:
            metrics["perplexity"] = float("inf")
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
