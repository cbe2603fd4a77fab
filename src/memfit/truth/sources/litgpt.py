"""Lightning's litgpt: its own modelling code; finetune scripts put the longest sample first
(config_hub, tutorials).

Its adapters are named by what they stand beside (lora.py Config), and on one GPU its scripts
checkpoint nothing (finetune/full.py setup), whatever a table of several machines says. The commits
that wrote the tables are of 0.4.
"""

from __future__ import annotations

from memfit.truth import words
from memfit.truth.case import Unfit
from memfit.truth.published import Reading, reader
from memfit.truth.rows import Row, count

NAMES = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "projection": "o_proj,dense",
    "mlp": "gate_proj,up_proj,down_proj,fc1,fc2,dense_h_to_4h,dense_4h_to_h",
    "head": "lm_head",
}
# generate/base.py asks "What food do llamas eat?" where no prompt is given: seven or eight tokens,
# by tokenizer
PROMPT = 8


@reader("Lightning-AI/litgpt")
def read(row: Row) -> Reading:
    options = words.numbers(row.text("dtype"))
    options |= {
        "framework": "litgpt",
        "batch": words.batch(row),
        "attention": "sdpa",
        "versions": versions(row),
    }
    if str(row.task) == "inference":
        new = count(row.more("max_new_tokens"))
        if new is None:
            raise Unfit("the number of generated tokens is not stated", row.seq)
        return Reading(
            options={
                **options,
                "task": "inference",
                "seq": PROMPT,
                "new_tokens": new,
                **words.static_cache(row),
                "cache": "static",
            },
            notes=["default prompt"],
        )
    options |= named(words.adapters(row)) | {
        "seq": words.length(row.seq),
        "task": "finetune",
        "optimizer": words.optimizer(row.text("optimizer")),
    }
    options |= {"checkpointing": "none", "adapter_dtype": "base", "prepare_kbit": False}
    if options["method"] == "qlora":
        options["optimizer"] = (
            "paged_adamw"  # utils.py instantiate_bnb_optimizer, whatever AdamW was asked for
        )
    return Reading(options=options)


def versions(row: Row) -> str:
    """What is not stated is of its time: bitsandbytes was pinned to 0.42 by litgpt 0.4
    (pyproject.toml)."""
    said = words.versions(row.text("engine_version"))
    known = {piece.partition("=")[0] for piece in said.split(",")}
    return ",".join(
        filter(None, (said, *(f"{name}={version}" for name, version in USUAL if name not in known)))
    )


USUAL = (("litgpt", "0.4"), ("bitsandbytes", "0.42"))


def named(options: words.Options) -> words.Options:
    """The same modules by the names that they have in the checkpoints of the model's own
    publisher."""
    if "targets" not in options:
        return options
    words_of = str(options["targets"]).replace("gate_proj,up_proj,down_proj", "mlp").split(",")
    return {**options, "targets": ",".join(NAMES.get(one, one) for one in words_of)}
