"""What each trainer does with the options that nobody names: its own defaults, a row for each range
of versions. `memfit` resolves them where a question is gathered from words; a `Job` built in code
keeps the values it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any, NamedTuple

from memfit.errors import InputError
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.model.heads import heads_of, label_head, usual_head
from memfit.model.quantized import bitsandbytes_options

ADAPTER_OPTIONS = ("rank", "alpha", "rslora", "targets", "dropout", "adapter_dtype")
HALF = "{half}"  # in a row: bf16, or fp16 on GPUs without it


class Implied(NamedTuple):
    """A method, the option that means it, and why."""

    name: str
    option: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """The defaults from version `since` on: of every method, and what differs for some.
    `as_stored`: a model in 16 bits is loaded, and trained, in those."""

    since: tuple[int, int]
    values: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    as_stored: bool = False
    cite: str


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Who trains: its name, the library that has it, the model classes and layouts it is used with,
    and its defaults, newest first."""

    name: str
    library: str
    classes: tuple[str, ...]  # parts of the names of the model classes that it trains
    heads: frozenset[str]
    layouts: frozenset[str]
    rows: tuple[Row, ...]
    framework: str = "trl"  # of `job.framework`
    fails: frozenset[str] = frozenset()  # classes that it takes, and stops at


# A model passed by name is loaded in fp32 (trl 1.16 trainer/utils.py create_model_from_path), as in
# TRL's quick start, which trains all weights; with adapters its guide passes a loaded model, which
# transformers 5 loads as the checkpoint stores it (modeling_utils.py `dtype`: "auto").
SFT = {
    "batch": 8,  # per_device_train_batch_size (transformers 5.23 training_args.py)
    "seq": 1024,  # max_length (trl 1.16 trainer/sft_config.py)
    "packing": False,
    "clip": 1.0,  # max_grad_norm (transformers 5.23 training_args.py)
    "precision": f"{HALF}-autocast",
}
WHOLE = {"full": {"precision": f"autocast-{HALF}"}, "freeze": {"precision": f"autocast-{HALF}"}}
PADDED = {"batch": 8, "packing": False, "clip": 1.0, "precision": "fp32"}
# The tokenizers of BERT, RoBERTa and T5 cut there (transformers 5.23 documentation, guides to
# text and token classification: `truncation=True`).
TOKENS = 512
ANSWER = 128  # tokens of a summary (transformers 5.23 run_summarization.py `max_target_length`)
ENCODERS = frozenset(
    {
        "classification",
        "token-classification",
        "question-answering",
        "masked-lm",
        "seq2seq-lm",
        "causal-lm",
    }
)
TRAINERS: Mapping[str, Trainer] = {
    "trl": Trainer(
        name="TRL",
        library="trl",
        classes=("ForCausalLM", "LMHead", "ForConditionalGeneration"),
        # its head finds no `base_model` beside the model itself (trl 1.16 trainer/utils.py
        # add_fused_lm_head)
        fails=frozenset({"Llama4ForConditionalGeneration"}),
        heads=frozenset({"auto", "causal-lm", "image-text"}),
        layouts=frozenset({"ddp", "fsdp", "zero", "tp", "cp"}),
        rows=(
            Row(
                since=(0, 22),
                values={**SFT, "checkpointing": "full"},
                methods=WHOLE,
                cite="trl 0.22 to 1.16 trainer/sft_config.py gradient_checkpointing, bf16",
            ),
            Row(
                since=(0, 19),
                values=SFT,
                methods=WHOLE,
                cite="trl 0.19 trainer/sft_config.py bf16",
            ),
            Row(
                since=(0, 0),
                values={**SFT, "precision": "fp32"},
                methods={"qlora": {"precision": HALF}},
                cite="trl 0.15 trainer/sft_config.py; transformers 4.48 training_args.py",
            ),
        ),
    ),
    "trainer": Trainer(
        name="transformers' Trainer",
        library="transformers",
        classes=(),
        heads=ENCODERS,
        layouts=frozenset({"ddp", "fsdp", "zero"}),
        framework="transformers",
        rows=(
            Row(
                since=(5, 0),
                values=PADDED,
                as_stored=True,
                cite="transformers 5.23 training_args.py per_device_train_batch_size, "
                "max_grad_norm, bf16, fp16; data_collator.py DataCollatorWithPadding; "
                "modeling_utils.py from_pretrained `dtype`",
            ),
            Row(
                since=(0, 0),
                values=PADDED,
                cite="transformers 4.57 training_args.py, modeling_utils.py from_pretrained",
            ),
        ),
    ),
}
OWN_HEAD = (1, 15)  # TRL from which its head is fused (trl 1.15 trainer/utils.py add_fused_lm_head)
GENERATES = ("causal-lm", "image-text", "seq2seq-lm")  # heads that answer token by token
FUSED = (2, 8)  # torch from which `optim` is adamw_torch_fused (transformers 5.23 training_args.py)


def assumed(
    values: Mapping[str, Any], config: Mapping[str, Any], layouts: frozenset[str], half: str
) -> dict[str, Any]:
    """The options that nobody named, as the checkpoint tells them and the trainer has them: empty
    where no trainer is assumed. `config` is the model's, `half` the 16-bit format of the GPU."""
    task = str(values.get("task", "finetune"))
    stored = bitsandbytes_options(config)
    found = of_encoder(values, config, task) or of_labels(values, config, task)
    found |= {name: value for name, value in stored.items() if name not in values}
    values = {**stored, **values}
    if task != "finetune":
        return found
    method = implied_method(values)
    if method is not None:
        found["method"] = method.name
        values = {**values, "method": method.name}
    name = values.get("framework")
    if name is None:
        heads = {"head": found.get("head", values.get("head", "auto"))}
        suiting = (
            one for one in TRAINERS.values() if suits(one, {**values, **heads}, config, layouts)
        )
        trainer = next(suiting, None)
        found["framework"] = "" if trainer is None else trainer.framework
    else:
        trainer = TRAINERS.get(str(name))
    if trainer is None:
        return {name: value for name, value in found.items() if name != "framework"}
    versions = known_versions(values)
    if "method" not in values:
        found["method"] = Job.method
    trained = str(values.get("method", Job.method))
    usual = usual_values(trainer, versions, trained, half, stored_in(config))
    return found | {option: value for option, value in usual.items() if option not in values}


def implied_method(values: Mapping[str, Any]) -> Implied | None:
    """The method that other options mean where none is named: weights that bitsandbytes quantizes
    cannot be trained but for adapters on them, and adapters have a rank."""
    if "method" in values:
        return None
    if str(values.get("quant", "none")) != "none":
        return Implied("qlora", "quant", "quantizes the weights")
    for name in ADAPTER_OPTIONS:
        if name in values:
            return Implied("lora", name, "is an option of LoRA")
    return None


def without_ligers_loss(values: dict[str, Any], framework: str) -> dict[str, Any]:
    """`values` as a trainer with its own fused head reads `use_liger_kernel`: Liger's kernels, but
    not Liger's loss."""
    liger = str(values.get("liger", "")).lower() in ("true", "yes")
    versions = known_versions(values)
    if framework == "trl" and versions.version("trl") >= OWN_HEAD and liger:
        return {name: one for name, one in values.items() if (name, one) != ("loss", "liger")}
    return values


def assumed_for_methods(
    values: Mapping[str, Any],
    methods: Sequence[str],
    question: tuple[Mapping[str, Any], frozenset[str], str],
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The options that nobody named where several methods are compared: those that all of them
    share, and those of each method. `question`: the model's config, the layouts, the 16-bit
    format."""
    each = {name: assumed({**values, "method": name}, *question) for name in methods}
    first = next(iter(each.values()), {})
    shared = {
        option: value
        for option, value in first.items()
        if all(one.get(option) == value for one in each.values())
    }
    return shared, {
        name: {option: value for option, value in one.items() if option not in shared}
        for name, one in each.items()
    }


def of_encoder(values: Mapping[str, Any], config: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The head and the length that a question about an encoder means; empty for other models."""
    heads = heads_of(config)
    if not heads:
        return {}
    found: dict[str, Any] = {}
    if str(values.get("head", "auto")) == "auto":
        found["head"] = usual_head(config, heads, task)
    head = str(found.get("head", values.get("head")))
    if head == "seq2seq-lm" and task != "inference" and "target_seq" not in values:
        found["target_seq"] = ANSWER
    if task == "inference" and head not in GENERATES and "new_tokens" not in values:
        found["new_tokens"] = 0
    if "seq" not in values:
        positions = config.get("max_position_embeddings")
        known = positions if isinstance(positions, int) and 0 < positions < TOKENS else TOKENS
        found["seq"] = known
    return found


def of_labels(values: Mapping[str, Any], config: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The head and the length that a question about a decoder with labels, or without a head,
    means; empty for one with words."""
    asked = str(values.get("head", "auto"))
    head = label_head(config, asked) or ("" if asked != "none" else asked)
    if not head:
        return {}
    found: dict[str, Any] = {"head": head} if asked == "auto" else {}
    if "seq" not in values:
        found["seq"] = Job.seq  # no guide says a length that its tokenizer cuts at
    if task == "inference" and "new_tokens" not in values:
        found["new_tokens"] = 0
    return found


def stored_in(config: Mapping[str, Any]) -> str:
    """The 16-bit format of a checkpoint's weights; empty for others."""
    inner = config.get("text_config")
    places = [config, inner] if isinstance(inner, Mapping) else [config]
    given = (place.get(key) for place in places for key in ("dtype", "torch_dtype"))
    named = next((one for one in given if isinstance(one, str)), "")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(named, "")


def usual_values(
    trainer: Trainer, versions: Job, method: str, half: str, stored: str = ""
) -> dict[str, Any]:
    """What a trainer of these versions does with each option for a method; `stored` is the 16-bit
    format of the checkpoint, if it has one."""
    row = next(one for one in trainer.rows if versions.version(trainer.library) >= one.since)
    usual = {**row.values, **row.methods.get(method, {})}
    if row.as_stored and stored:
        usual["precision"] = stored
    if versions.version("torch") >= FUSED:
        usual["optimizer"] = "adamw_fused"
    return {
        option: value.replace(HALF, half) if isinstance(value, str) else value
        for option, value in usual.items()
    }


@cache
def first_trainer() -> tuple[str, Mapping[str, Any]]:
    """The trainer that questions assume, and what it does where nobody names an option."""
    key, trainer = next(iter(TRAINERS.items()))
    usual = usual_values(trainer, Job(), Job.method, "bf16")
    return trainer.name, {**usual, "framework": key}


def trainer_default(name: str) -> tuple[str, Any] | None:
    """The trainer that questions assume, and what it does with this option where nobody names it;
    None where it changes nothing."""
    trainer, usual = first_trainer()
    return (trainer, usual[name]) if name in usual else None


def decisive(job: Job) -> frozenset[str]:
    """The options that a question has to name, at their defaults too, to mean this job."""
    if job.task != "finetune":
        return frozenset()
    trainer = TRAINERS.get(job.framework)  # the one that questions assume for language models
    rows = () if trainer is None else trainer.rows
    options = {name for row in rows for name in (*row.values, "optimizer")}
    return frozenset({"framework"} | options)


def suits(
    trainer: Trainer, values: Mapping[str, Any], config: Mapping[str, Any], layouts: frozenset[str]
) -> bool:
    """Whether it trains this kind of model, with this head and these layouts."""
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, (list, tuple)) else ()
    if trainer.classes and heads_of(config):
        return False  # guides train encoders with transformers' own Trainer, whatever their head
    if not (layouts <= trainer.layouts and str(values.get("head", "auto")) in trainer.heads):
        return False
    if not trainer.classes:
        return bool(heads_of(config) or label_head(config, str(values.get("head", "auto"))))
    if trainer.fails & set(map(str, named)):
        return False
    return config.get("is_encoder_decoder") is not True and (
        not named or any(part in str(one) for one in named for part in trainer.classes)
    )


def known_versions(values: Mapping[str, Any]) -> Job:
    """A job that knows the versions; those that cannot be read are reported elsewhere."""
    try:
        return Job(versions=str(values.get("versions", "")))
    except InputError:
        return Job()


__all__ = [
    "TRAINERS",
    "Trainer",
    "assumed",
    "assumed_for_methods",
    "decisive",
    "implied_method",
    "trainer_default",
    "without_ligers_loss",
]
