"""Hugging Face's comparison of PEFT methods on MetaMathQA (huggingface/peft, method_comparison): a
loop of its own, one L40S."""

from __future__ import annotations

from memfit.truth import words
from memfit.truth.case import Unfit
from memfit.truth.published import Reading, reader
from memfit.truth.rows import Row, number


@reader("huggingface/peft")
def read(row: Row) -> Reading:
    """What is held after a step depends on the length only by the last batch's outputs; the peak
    depends on the longest batch."""
    options = words.adapters(row) | {
        "framework": "transformers",
        "task": "finetune",
        "batch": words.batch(row),
    }
    if "full" not in row.text("method") and isinstance(row.more("peft_config"), dict):
        options |= config(row.more("peft_config"))
    mean = number(row.more("mean_tokens_per_sample"))
    notes: list[str] = []
    if row.metric == "allocated_end_of_step" and mean:
        options["seq"] = max(1, round(mean))
        options["zero_grad"], options["keep_outputs"] = (
            "keep",
            True,
        )  # run.py train: `outputs` is a variable of the loop
        notes.append("length: the mean over samples, since the figure is a mean over steps")
    else:
        options["seq"] = words.length(row.seq)
    options |= {
        "precision": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(
            str(row.more("weights_dtype")), "bf16"
        ),
        "optimizer": words.optimizer(row.text("optimizer")),
        "versions": words.versions(row.text("engine_version")),
        "attention": "sdpa",
        "packing": False,
        "checkpointing": words.checkpointing(bool(row.grad_checkpointing)),
        "adapter_dtype": "float32" if row.more("autocast_adapter_dtype") is not False else "base",
    }
    return Reading(options=options, notes=notes)


def config(given: dict[str, object]) -> words.Options:
    """The LoRA config in the row; options that change the method are refused."""
    odd = [
        key
        for key in (
            "use_dora",
            "trainable_token_indices",
            "layer_replication",
            "use_bdlora",
            "arrow_config",
        )
        if given.get(key)
    ]
    if (
        odd
        or str(given.get("bias", "none")) != "none"
        or str(given.get("init_lora_weights", "true")).lower() in ("loftq", "eva", "mica")
    ):
        raise Unfit("the method has no formula", odd or given.get("init_lora_weights"))
    options: words.Options = {}
    if isinstance(given.get("lora_dropout"), (int, float)):
        options["dropout"] = float(str(given["lora_dropout"]))
    saved = given.get("modules_to_save")
    if isinstance(saved, list):
        options["modules_to_save"] = ",".join(map(str, saved))
    return options
