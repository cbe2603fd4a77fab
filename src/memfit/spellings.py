"""Other spellings of options: what trainers, launchers and serving engines call them, in one table.
Flags, keys of a job file and Python arguments all read it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from functools import cache
from typing import Any, NamedTuple

from memfit import renames
from memfit.errors import InputError, Problem
from memfit.lazy_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """Other names of one option.

    `also` take the same value. `flags` take none: each is (value, value if it is `false`; None
    leaves the option alone). `values` are other words for its values. `forms` take a number that is
    put into the text. `thousand` is what a `k` means: tokens are counted in powers of two.
    `unless`: the names in `also` belong to that option, where a command has it.
    """

    also: tuple[str, ...] = ()
    flags: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    forms: Mapping[str, str] = field(default_factory=dict)
    thousand: int = 0
    unless: str = ""


LENGTHS = (
    "max-seq-length",
    "max-seq-len",
    "max-length",
    "seq-length",
    "seq-len",
    "sequence-length",
    "sequence-len",
    "context",
    "context-length",
    "ctx",
    "ctx-size",
    "num-ctx",
    "cutoff-len",
    "max-model-len",
    "model-max-length",
    "block-size",
    "prompt",
    "prompt-length",
    "c",
)
DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}
OPTIMS = {
    "adamw_torch": "adamw",
    "adamw_hf": "adamw",
    "adamw_torch_fused": "adamw_fused",
    "adamw_bnb_8bit": "adamw_8bit",
    "adam_8bit": "adamw_8bit",
    "adamw8bit": "adamw_8bit",
    "pagedadamw8bit": "paged_adamw_8bit",
    "pagedadamw32bit": "paged_adamw",
    "paged_adamw_32bit": "paged_adamw",
    "lion_pytorch": "lion",
}
SPELLINGS: dict[str, Spelling] = {
    "model": Spelling(also=("model-name-or-path", "model-name", "model-id", "base-model", "m")),
    "gpu": Spelling(
        also=("gpus", "device", "hardware", "card", "machine"),
        forms=dict.fromkeys(
            (
                "num-gpus",
                "n-gpus",
                "ngpus",
                "gpu-count",
                "nproc-per-node",
                "num-processes",
                "world-size",
            ),
            "{}",
        ),
    ),
    "memory": Spelling(also=("vram", "gpu-memory", "gpu-mem")),
    "use": Spelling(
        also=("layout", "layouts", "parallel", "strategy"),
        flags={"fsdp": ("fsdp", None), "ddp": ("ddp", None), "zero": ("zero", None)},
        forms={
            "tp": "tp={}",
            "tp-size": "tp={}",
            "tensor-parallel": "tp={}",
            "tensor-parallel-size": "tp={}",
            "tensor-model-parallel-size": "tp={}",
            "pp": "pp={}",
            "pp-size": "pp={}",
            "pipeline-parallel-size": "pp={}",
            "pipeline-model-parallel-size": "pp={}",
            "cp": "cp={}",
            "context-parallel-size": "cp={}",
            "ep": "ep={}",
            "expert-parallel-size": "ep={}",
            "expert-model-parallel-size": "ep={}",
            "dp": "ddp={}",
            "data-parallel-size": "ddp={}",
            "ddp": "ddp={}",
            "fsdp": "fsdp={}",
            "zero": "zero,stage={}",
            "zero-stage": "zero,stage={}",
        },
    ),
    "by": Spelling(flags={"trace": ("trace", None)}, values={"formulas": "formula"}),
    "dataset_tokens": Spelling(also=("tokens", "train-tokens", "num-tokens")),
    "examples": Spelling(also=("num-examples", "samples", "num-samples")),
    "task": Spelling(
        flags={
            "inference": ("inference", None),
            "pretrain": ("pretrain", None),
            "finetune": ("finetune", None),
            "fine-tune": ("finetune", None),
        },
        values={
            "infer": "inference",
            "generate": "inference",
            "serve": "inference",
            "sft": "finetune",
            "fine-tune": "finetune",
            "finetuning": "finetune",
            "train": "finetune",
            "pt": "pretrain",
        },
    ),
    "method": Spelling(
        also=("finetuning-type", "train-type", "tuner-type", "peft-type", "peft"),
        flags={
            "lora": ("lora", None),
            "use-lora": ("lora", None),
            "use-peft": ("lora", None),
            "qlora": ("qlora", None),
            "full": ("full", None),
            "full-finetune": ("full", None),
            "freeze": ("freeze", None),
        },
        values={"full-finetune": "full", "fft": "full"},
    ),
    "framework": Spelling(also=("library", "trainer"), values={"hf": "transformers"}),
    "batch": Spelling(
        also=(
            "batch-size",
            "per-device-train-batch-size",
            "per-device-batch-size",
            "micro-batch-size",
            "micro-batch",
            "train-micro-batch-size-per-gpu",
            "bs",
            "b",
        )
    ),
    "seq": Spelling(also=LENGTHS, thousand=1024),
    "accumulate": Spelling(
        also=("gradient-accumulation-steps", "gradient-accumulation", "grad-accum", "accumulation")
    ),
    "target_seq": Spelling(also=("max-target-length",), thousand=1024),
    "longest": Spelling(thousand=1024),
    "precision": Spelling(also=("dtype", "torch-dtype"), values=DTYPES),
    "optimizer": Spelling(also=("optim",), values=OPTIMS),
    "clip": Spelling(also=("max-grad-norm", "gradient-clipping", "gradient-clip-val")),
    "checkpointing": Spelling(
        also=("recompute-granularity",),
        flags={
            "gradient-checkpointing": ("full", "none"),
            "activation-checkpointing": ("full", "none"),
            "use-gradient-checkpointing": ("full", "none"),
            "no-gradient-checkpointing": ("none", None),
        },
    ),
    "reentrant": Spelling(also=("use-reentrant",)),
    "activation_offload": Spelling(
        flags={"activation-offloading": ("streams", "none")}, values={"true": "streams"}
    ),
    "attention": Spelling(
        also=("attn-implementation", "attn"),
        flags={
            "flash-attn": ("flash-attn-2", None),
            "flash-attention": ("flash-attn-2", None),
            "use-flash-attn": ("flash-attn-2", None),
        },
        values={
            "flash-attention-2": "flash-attn-2",
            "flash-attention-3": "flash-attn-3",
            "fa2": "flash-attn-2",
            "fa3": "flash-attn-3",
        },
    ),
    "loss": Spelling(flags={"use-liger-kernel": ("liger", None), "use-liger": ("liger", None)}),
    "liger": Spelling(flags={"use-liger-kernel": (True, False), "use-liger": (True, False)}),
    "rank": Spelling(also=("lora-rank", "lora-r", "lora-dim", "r")),
    "alpha": Spelling(also=("lora-alpha",)),
    "rslora": Spelling(also=("use-rslora",)),
    "dropout": Spelling(also=("lora-dropout",)),
    "targets": Spelling(also=("target-modules", "lora-target-modules", "lora-target")),
    "modules_to_save": Spelling(also=("lora-modules-to-save", "additional-target")),
    # transformers' classes and pipelines, and PEFT's task types
    "head": Spelling(
        also=("task-type",),
        values={
            "sequence-classification": "classification",
            "text-classification": "classification",
            "seq-cls": "classification",
            "ner": "token-classification",
            "token-cls": "token-classification",
            "qa": "question-answering",
            "question-ans": "question-answering",
            "feature-extraction": "none",
            "embedding": "none",
            "embeddings": "none",
            "fill-mask": "masked-lm",
            "mlm": "masked-lm",
            "seq-2-seq-lm": "seq2seq-lm",
            "summarization": "seq2seq-lm",
            "translation": "seq2seq-lm",
            "clm": "causal-lm",
            "text-generation": "causal-lm",
            "image-text-to-text": "image-text",
        },
    ),
    "quant": Spelling(
        also=("quantization", "bnb-4bit-quant-type", "quantization-bit"),
        flags={
            "load-in-4bit": ("nf4", None),
            "load-in-8bit": ("int8", None),
            "4bit": ("nf4", None),
            "8bit": ("int8", None),
            "int4": ("nf4", None),
            "int8": ("int8", None),
        },
        values={
            "4bit": "nf4",
            "4-bit": "nf4",
            "4": "nf4",
            "8bit": "int8",
            "8-bit": "int8",
            "8": "int8",
            "bitsandbytes": "nf4",
            "bnb": "nf4",
        },
    ),
    "double_quant": Spelling(also=("use-double-quant", "bnb-4bit-use-double-quant")),
    "quant_compute": Spelling(
        also=("bnb-4bit-compute-dtype",),
        values={"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"},
    ),
    "new_tokens": Spelling(
        also=("max-new-tokens", "max-tokens", "output-tokens", "output-len", "n-predict"),
        thousand=1024,
    ),
    "requests": Spelling(also=("users",)),
    "max_first": Spelling(also=("ttft",)),
    "max_token": Spelling(also=("tpot",)),
    # of plans for a serving engine
    "users": Spelling(also=("requests",)),
    "in": Spelling(also=("seq",), thousand=1024),
    "out": Spelling(also=("new-tokens",), thousand=1024),
    "ttft": Spelling(also=("max-first",)),
    "tpot": Spelling(also=("max-token",)),
    "beams": Spelling(also=("num-beams",)),
    "evaluate": Spelling(also=("do-eval",)),
    "eval_batch": Spelling(also=("per-device-eval-batch-size", "eval-batch-size")),
    "alloc_conf": Spelling(also=("pytorch-cuda-alloc-conf", "pytorch-alloc-conf")),
    "gpus": Spelling(also=("gpu", "device", "hardware", "card", "machine")),
    "lengths": Spelling(also=("seq", "length", *LENGTHS), thousand=1024, unless="seq"),
    "order": Spelling(flags={"group-by-length": ("grouped", None)}),
    "pad_to_multiple": Spelling(also=("pad-to-multiple-of",)),
    "evaluate_every": Spelling(also=("eval-steps", "eval-every")),
    "save_every": Spelling(also=("save-steps",)),
    "steps": Spelling(also=("max-steps",)),
    "text_key": Spelling(also=("dataset-text-field", "text-column")),
    "methods": Spelling(also=("method", "finetuning-type")),
}
# Spellings with two meanings: refused, with what each is called here.
AMBIGUOUS = {
    "bf16": "`--precision bf16` for weights and arithmetic in bf16, `--precision autocast-bf16` "
    "for fp32 weights under autocast (TrainingArguments' `bf16=True`)",
    "fp16": "`--precision fp16` for weights and arithmetic in fp16, `--precision autocast-fp16` "
    "for fp32 weights under autocast (TrainingArguments' `fp16=True`)",
    "train-batch-size": "`--batch` for one GPU's micro-batch, `--accumulate` for micro-batches "
    "per step (DeepSpeed's `train_batch_size` is their product over all GPUs)",
}
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_KILO = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([km])", re.IGNORECASE)
_PLAIN = re.compile(r"[0-9]+")


class Meaning(NamedTuple):
    """What one spelling says: this option, with this value (None: the value that follows)."""

    option: str
    yes: Any = None
    no: Any = None
    form: str = ""


@cache
def meanings(known: frozenset[str]) -> Mapping[str, tuple[Meaning, ...]]:
    """Spelling, with dashes -> what it means among the options `known`; no option's own name."""
    found: dict[str, tuple[Meaning, ...]] = {}
    for option, one in SPELLINGS.items():
        if option not in known:
            continue
        for name in one.also if one.unless not in known else ():
            found[name] = (*found.get(name, ()), Meaning(option))
        for name in {**one.flags, **one.forms}:
            yes, no = one.flags.get(name, (None, None))
            meaning = Meaning(option, yes, no, one.forms.get(name, ""))
            found[name] = (*found.get(name, ()), meaning)
    own = {name.replace("_", "-") for name in known}
    return {name: said for name, said in found.items() if name not in own}


def names(known: Iterable[str]) -> tuple[str, ...]:
    """The options `known` and their other names that take a value, with dashes."""
    own = frozenset(known)
    others = [
        name
        for name, said in meanings(own).items()
        if all(one.yes is None and one.no is None and not one.form for one in said)
    ]
    return (*(name.replace("_", "-") for name in own), *others)


def value(option: str, given: Any) -> Any:
    """`given` in the words of `option`: `bfloat16` is bf16, `8k` tokens are 8192."""
    one = SPELLINGS.get(option)
    if one is None or not isinstance(given, str):
        return given
    if "," in given and (one.values or one.thousand):
        return ",".join(str(value(option, piece.strip())) for piece in given.split(","))
    text = given.strip()
    match = _KILO.fullmatch(text) if one.thousand else None
    if match:
        size = float(match[1]) * one.thousand ** (1 if match[2].lower() == "k" else 2)
        return str(int(size)) if size.is_integer() else given
    folded = text.lower()
    for word, meant in one.values.items():
        if folded.replace("_", "-") == word.replace("_", "-"):
            return meant
    return given


def switched(said: str | bool) -> bool | None:
    """Whether a flag's own value says yes or no; None for anything else."""
    word = str(said).strip().lower()
    return True if word in TRUE else False if word in FALSE else None


def settings(name: str, said: tuple[Meaning, ...], given: Any) -> dict[str, Any]:
    """The options that one spelling with its value sets."""
    found: dict[str, Any] = {}
    for one in said:
        number = given if isinstance(given, int) and not isinstance(given, bool) else None
        text = str(number) if number is not None else str(given).strip()
        if one.form and _PLAIN.fullmatch(text) and not isinstance(given, bool):
            found[one.option] = one.form.format(text)
        elif one.yes is None and one.no is None and not one.form:
            found[one.option] = value(one.option, given)
        elif (switch := switched(given)) is not None:
            chosen = one.yes if switch else one.no
            found |= {} if chosen is None else {one.option: chosen}
        else:
            hint = "give a number" if one.form else "it takes no value, or `true` or `false`"
            raise InputError.one(f"`{name}: {text[:40]}` cannot be read", where=name, hint=hint)
    return found


def plain(
    values: Mapping[str, Any], known: Iterable[str], problems: list[Problem], where: str = ""
) -> dict[str, Any]:
    """`values` under the options' own names and in their own words. Two spellings of one option
    with different values are a problem; unknown names stay as they are."""
    own = frozenset(known)
    table = meanings(own)
    found: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, given in values.items():
        name, at = str(key), f"{where}{key}"
        name = (name not in own and renames.current(name.replace("-", "_"))) or name
        dashed = name.replace("_", "-").lower()
        if name in own:
            sets = {name: value(name, given)}
        elif dashed in table:
            try:
                sets = settings(name, table[dashed], given)
            except InputError as bad:
                problems += bad.problems
                continue
        elif dashed in AMBIGUOUS:
            problems.append(
                Problem(message=f"`{name}` is ambiguous", where=at, hint=AMBIGUOUS[dashed])
            )
            continue
        else:
            sets = {name: given}
        for option, chosen in sets.items():
            if option == "use" and option in found:
                found[option] = f"{joined(found[option])} {joined(chosen)}"
            elif option in found and found[option] != chosen:
                message = f"`{origin[option]}` and `{name}` set `{option}` to different values"
                problems.append(Problem(message=message, where=at, hint="keep one of them"))
            else:
                found[option], origin[option] = chosen, name
    return found


def joined(uses: Any) -> str:
    """Layouts as one text."""
    return " ".join(map(str, uses)) if isinstance(uses, (list, tuple)) else str(uses)
