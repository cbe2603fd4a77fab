"""Options of trainers and launchers that memfit does not take, and what to type in their place."""

from __future__ import annotations

from memfit.errors import Problem

# They change what is learned or logged, but no memory.
WITHOUT_EFFECT = frozenset(
    (
        "adam-beta1",
        "adam-beta2",
        "adam-epsilon",
        "epochs",
        "hub-token",
        "learning-rate",
        "logging-dir",
        "logging-steps",
        "logging-strategy",
        "lr",
        "lr-scheduler",
        "lr-scheduler-type",
        "min-lr",
        "num-epochs",
        "num-train-epochs",
        "output-dir",
        "report-to",
        "run-name",
        "save-strategy",
        "save-total-limit",
        "wandb-project",
        "warmup",
        "warmup-ratio",
        "warmup-steps",
    )
)
# The same, for those that take no value.
SWITCHES = frozenset(
    (
        "do-train",
        "overwrite-output-dir",
        "push-to-hub",
        "quiet",
        "trust-remote-code",
        "v",
        "verbose",
    )
)
_SAMPLING = "greedy decoding is assumed; sampling copies the last token's logits a few times"
# They change memory, which is not counted.
NOT_COUNTED = {
    "repetition-penalty": _SAMPLING,
    "temperature": _SAMPLING,
    "top-k": _SAMPLING,
    "top-p": _SAMPLING,
    # torch 2.x optim/adam.py and sgd.py `_multi_tensor_*`: `_foreach_add(grads, params)`
    "weight-decay": "AdamW needs no memory for it; Adam and SGD copy the gradients",
}
_LENGTHS = "`--lengths data.jsonl` reads the lengths of your texts"
INSTEAD = {
    **dict.fromkeys(("vllm", "sglang", "ollama", "llamacpp"), "an engine is named by `--engine`"),
    "cpu": "memfit is about GPU memory; `--engine llama.cpp -ngl 0` counts a run on the CPU",
    "dataset": _LENGTHS,
    "dataset-name": _LENGTHS,
    "deepspeed": "use `--use zero,stage=3`, or `stage=1` or `stage=2`",
    "fsdp-config": "use `--use fsdp=8`; its settings follow with commas",
    "train-file": _LENGTHS,
}
# Objectives of post-training that people name as a task, a method, a loss or a trainer.
OBJECTIVES = frozenset(
    ("dpo", "grpo", "gspo", "ipo", "kto", "orpo", "ppo", "reward", "rlhf", "rloo", "simpo")
)
NO_OBJECTIVE = (
    "memfit knows supervised fine-tuning; `memfit trace train.py --gpu NAME` can run your own "
    "script"
)
# What to use in place of other trainers. The first extend the Trainer of transformers, as TRL's.
OTHER_TRAINERS = {
    **dict.fromkeys(
        ("axolotl", "llama-factory", "llamafactory", "ms-swift", "swift"),
        "the nearest is `--framework trl`: both extend the Trainer of transformers",
    ),
    "unsloth": "its kernels are `--framework trl --unsloth norms,rotary,loss,adapters`",
}


def is_switch(typed: str) -> bool:
    """Whether an option of a trainer takes no value."""
    return folded(typed) in SWITCHES


def unrelated(typed: str, where: str = "") -> Problem | None:
    """What to say of an option of a trainer or a launcher; None for any other word. One that was
    typed with dashes can be removed from the command."""
    name, shown = folded(typed), f"`{typed[:60]}`"
    fix = (typed, "") if typed.startswith("-") else None
    if name in WITHOUT_EFFECT | SWITCHES:
        message = f"{shown} does not change GPU memory"
        return Problem(message=message, where=where, hint="remove it", fix=fix)
    if name in NOT_COUNTED:
        hint = f"remove it; {NOT_COUNTED[name]}"
        return Problem(message=f"memfit does not count {shown}", where=where, hint=hint, fix=fix)
    if name in OBJECTIVES:
        return Problem(message=f"unknown option {shown}", where=where, hint=NO_OBJECTIVE)
    if name in INSTEAD:
        return Problem(message=f"unknown option {shown}", where=where, hint=INSTEAD[name])
    return None


def folded(typed: str) -> str:
    """An option as the tables have it: without dashes before it, with dashes inside."""
    return typed.lstrip("-").replace("_", "-").lower()


__all__ = ["NO_OBJECTIVE", "OBJECTIVES", "OTHER_TRAINERS", "is_switch", "unrelated"]
