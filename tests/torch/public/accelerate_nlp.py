# memfit: -- --mixed_precision bf16
"""In the order of accelerate's nlp_example.py: MRPC tokenized on the main process first, a collate
function that pads, gradient accumulation by hand, an evaluation that gathers."""

import argparse

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
    set_seed,
)

MOST, EVAL = 16, 32


def dataloaders(accelerator, batch_size):
    tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
    datasets = load_dataset("glue", "mrpc")

    def tokenize(rows):
        return tokenizer(rows["sentence1"], rows["sentence2"], truncation=True, max_length=None)

    with accelerator.main_process_first():
        tokenized = datasets.map(
            tokenize, batched=True, remove_columns=["idx", "sentence1", "sentence2"]
        )
    tokenized = tokenized.rename_column("label", "labels")

    def collate(rows):
        multiple = 8 if accelerator.mixed_precision != "no" else None
        return tokenizer.pad(
            rows, padding="longest", pad_to_multiple_of=multiple, return_tensors="pt"
        )

    return (
        DataLoader(
            tokenized["train"],
            shuffle=True,
            collate_fn=collate,
            batch_size=batch_size,
            drop_last=True,
        ),
        DataLoader(tokenized["validation"], collate_fn=collate, batch_size=EVAL),
    )


def train(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    batch_size, accumulation = config["batch_size"], 1
    if batch_size > MOST:
        accumulation, batch_size = batch_size // MOST, MOST
    set_seed(config["seed"])
    train_loader, eval_loader = dataloaders(accelerator, batch_size)
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", return_dict=True)
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    scheduler = get_linear_schedule_with_warmup(optimizer, 100, len(train_loader))
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        for step, batch in enumerate(train_loader):
            batch.to(accelerator.device)
            loss = model(**batch).loss / accumulation
            accelerator.backward(loss)
            if step % accumulation == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if step == 4:
                break
        model.eval()
        right = total = 0
        for batch in eval_loader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics(
                (outputs.logits.argmax(dim=-1), batch["labels"])
            )
            right, total = right + (predictions == references).sum().item(), total + len(references)
        accelerator.print(f"epoch {epoch}: {right / total:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true")
    train({"lr": 2e-5, "num_epochs": 1, "seed": 42, "batch_size": 16}, parser.parse_args())
