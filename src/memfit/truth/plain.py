"""Rows of a publisher whom nobody here knows: the fields as they are, in the words that most
publishers use, and where nothing is said what the framework does then. Every such thing is noted.
"""

from __future__ import annotations

import re

from memfit.job import Job
from memfit.strategy import DDP, FSDP, ONE, TP, Strategy, ZeRO
from memfit.truth import releases, words
from memfit.truth.case import Unfit
from memfit.truth.rows import Row, count

# Whose modelling code runs, by what the engine is called: the first word that is found decides.
ENGINES = (
    ("trl", "trl"),
    ("torchtune", "torchtune"),
    ("torchtitan", "torchtitan"),
    ("litgpt", "litgpt"),
    ("lit-gpt", "litgpt"),
    ("gpt-fast", "litgpt"),  # whose model litgpt's was written after (generate/base.py)
    ("gpt_fast", "litgpt"),
    ("megatron", "megatron"),
    ("axolotl", "transformers"),
    ("llama-factory", "transformers"),
    ("llama factory", "transformers"),
    ("llamafactory", "transformers"),
    ("transformers", "transformers"),
    ("hugging", "transformers"),
    ("accelerate", "transformers"),
    ("peft", "transformers"),
)
HUGGING = re.compile(r"\bhf\b")
OWN_KERNELS = ("unsloth", "liger", "cut cross", "cutcrossentropy", "kernelsplugin")
# Their `bf16: true` loads 16-bit weights and runs the Trainer under autocast.
MIXED = ("axolotl", "llama-factory", "llama factory", "llamafactory")
LOOP = re.compile(r"\bloop\b")
REENTRANT = (
    5,
    0,
    # transformers whose checkpoints are not reentrant by default (modeling_utils.py
    # gradient_checkpointing_enable)
)
MONTH = re.compile(r"\b20\d\d-(?:0[1-9]|1[0-2])\b")
BESIDE = (
    "transformers",
    "torch",
    "peft",
    "accelerate",
    "bitsandbytes",
)  # what a Trainer's run rests on
OTHER_LOSSES = ("dpo", "grpo", "ppo", "orpo", "kto", "rlhf", "reward", "eval", "distill")
INFERENCE = ("inf", "gen", "decod", "prefill")
SIZE = r"(?:\s*(?:x|=|-way\s*)?\s*(\d{1,4}))?"


def options_of(row: Row, notes: list[str]) -> words.Options:
    """Options of the Job. `notes` are told what was assumed."""
    engine, task = row.text("engine"), row.text("task")
    framework = framework_of(engine)
    for kernels in OWN_KERNELS:
        if kernels in f"{engine} {row.text('extra')}":
            raise Unfit("kernels without formula", kernels)
    if str(row.more("compile")).lower() == "true" or "compiled" in engine:
        raise Unfit("a technique without formula", "compile")
    options = words.numbers(
        row.text("dtype", "method") if "qlora" in row.text("method") else row.text("dtype")
    )
    options |= {
        "framework": framework,
        "batch": words.batch(row),
        "attention": words.attention(row.text("attention")),
        "versions": versions_of(row.text("engine_version", "engine"), framework, notes),
    }
    if any(name in task for name in OTHER_LOSSES):
        raise Unfit("a technique without formula", task)
    if task.startswith(INFERENCE) or (not task and row.text("method") in ("", "none")):
        return {**options, **words.lengths(row), **words.static_cache(row), "task": "inference"}
    return trained(row, options, notes)


def trained(row: Row, options: words.Options, notes: list[str]) -> words.Options:
    engine, hugging = row.text("engine"), options["framework"] in ("transformers", "trl")
    if (
        any(name in engine for name in MIXED)
        and options["precision"] in ("bf16", "fp16")
        and "pure" not in row.text("dtype")
    ):
        options["precision"] += "-autocast"
        notes.append("16-bit weights under autocast, as its trainer runs them")
    text = row.text("optimizer")
    if not text and hugging:
        text = "adamw"
        notes.append("the optimizer is not stated: AdamW, the Trainer's own")
    if row.grad_checkpointing is None:
        notes.append("checkpointing is not stated: none")
    options |= words.adapters(row) | {"seq": words.length(row.seq), "task": "finetune"}
    if row.text("task").startswith("pre") and options["method"] == "full":
        options["task"] = "pretrain"
    options |= {
        "optimizer": words.optimizer(text),
        "checkpointing": words.checkpointing(row.grad_checkpointing),
    }
    options["accumulate"] = next(
        (found for name in words.ACCUMULATION if (found := count(row.more(name)))), 1
    )
    if hugging:
        older = Job(versions=options["versions"]).version("transformers") < REENTRANT
        options["reentrant"] = options["checkpointing"] != "none" and words.reentrant(
            row.text("grad_checkpointing", "extra"), older
        )
        options["clip"] = 0.0 if LOOP.search(engine) else 1.0
    return options


def versions_of(text: str, framework: str, notes: list[str]) -> str:
    """What is said; where that is an older transformers or torch, or a month, the other libraries
    are those of its time."""
    found = dict(piece.split("=") for piece in words.versions(text).split(",") if piece)
    if framework not in ("transformers", "trl"):
        return ",".join(f"{name}={version}" for name, version in found.items())
    dated = MONTH.search(text)
    known = [
        month
        for name in ("transformers", "torch")
        if name in found and (month := releases.month_of(name, found[name]))
    ]
    month = known[0] if known else dated[0] if dated and not found else None
    for name in (*BESIDE, *(["trl"] if framework == "trl" else [])) if month else ():
        version = releases.newest(name, month or "")
        if name not in found and version is not None:
            found[name] = version
            notes.append(f"{name} {version} is taken, the newest of {month}")
    if "transformers" not in found:
        notes.append("no version is stated: the newest transformers is taken")
    return ",".join(f"{name}={version}" for name, version in found.items())


def framework_of(engine: str) -> str:
    found = next(
        (framework for name, framework in ENGINES if name in engine),
        "transformers" if HUGGING.search(engine) else None,
    )
    if found is None:
        raise Unfit("whose modelling code ran is not known", engine or "not stated")
    return found


# ------------------------------------------------------------------------------------ several GPUs
SHARDED = re.compile(rf"\bfsdp(?:\s*v?([12])\b(?=\D*$|\s*[,(]))?{SIZE}")
STAGE = re.compile(r"\bzero\s*(?:[-_]|stage)?\s*[-_]?\s*([0123])\b")
TENSORS = re.compile(r"\b(?:tp|tensor[- ]parallel(?:ism)?)\s*(?:x|=|-)?\s*(\d{1,4})")
REPLICAS = re.compile(r"\b(?:ddp|dp|data[- ]parallel)\b|\b(?:ddp|dp)\s*(?:x|=|-)?\s*(\d{1,4})")
BEYOND = re.compile(
    r"\b(?:pp|cp|ep|sp|hsdp|device[_ "
    r"]map|pipeline|expert|context|ulysses|hybrid|multi-?node)\b|\b(?:pp|cp|ep|sp)\d"
)
TORCH2 = ("torchtitan", "torchtune")  # whose FSDP is the second


def strategy_of(row: Row, notes: list[str]) -> Strategy:
    """One layout over all GPUs, or one beside tensor parallelism. Sizes that are not said are what
    the number of GPUs leaves."""
    gpus, text = count(row.gpus) or 1, row.text("parallel")
    if "sum" in row.text("scope") and gpus > 1:
        raise Unfit("a sum over GPUs, not one GPU's memory", row.scope)
    if gpus == 1 and text in ("", "none", "no", "single gpu"):
        return ONE
    if text in ("", "none", "no") or BEYOND.search(text):
        raise Unfit(
            "a strategy for several GPUs: not yet",
            text or f"{gpus} GPUs, and not how they share the work",
        )
    tensors = TENSORS.search(text)
    tp = int(tensors[1]) if tensors else 1
    rest, left = divmod(gpus, tp)
    sharded, stage, replicas = SHARDED.search(text), STAGE.search(text), REPLICAS.search(text)
    if left or not rest or not (tensors or sharded or stage or replicas):
        raise Unfit("a strategy for several GPUs: not yet", text)
    within = TP(size=tp) if tp > 1 else None
    if sharded:
        return Strategy(
            tp=within, fsdp=shards(row, rest, [int(one) for one in sharded.groups() if one], notes)
        )
    if stage and stage[1] != "0":
        away = "cpu" if "offload" in text else "none"
        notes.append("DeepSpeed's own bucket sizes are taken")
        weights = away if stage[1] == "3" else "none"
        return Strategy(
            tp=within,
            zero=ZeRO(
                size=rest, stage=int(stage[1]), offload_optimizer=away, offload_param=weights
            ),
        )
    if replicas and replicas[1] and int(replicas[1]) != rest:
        raise Unfit("the layout does not fill the GPUs", f"{text} on {gpus}")
    return Strategy(tp=within, ddp=DDP(size=rest) if rest > 1 else None)


def shards(row: Row, ranks: int, said: list[int], notes: list[str]) -> FSDP:
    """A number behind `fsdp` is its ranks where it is as many as there are, and else its
    version."""
    version = 2 if any(name in row.text("engine") for name in TORCH2) else 1
    others = [one for one in said if one != ranks]
    if any(one not in (1, 2) for one in others):
        raise Unfit("the layout does not fill the GPUs", f"{row.text('parallel')} on {row.gpus}")
    if others:
        version = others[0]
    else:
        notes.append(
            f"FSDP{version} is taken, which "
            f"{'torchtitan and torchtune call' if version == 2 else 'accelerate calls by default'}"
        )
    text = row.text("parallel")
    return FSDP(
        size=ranks,
        version=version,
        reshard=not re.search(r"shard[_ -]grad[_ -]op", text),
        offload="offload" in text,
        backward_prefetch="pre" if "backward_pre" in text else "auto",
    )


__all__ = ["options_of", "strategy_of"]
