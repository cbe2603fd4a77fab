"""Options of trainers and launchers that memfit does not take, and what to type in their place."""

from __future__ import annotations

# They change what is learned, what is logged or how answers are sampled, but no memory.
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
        "repetition-penalty",
        "report-to",
        "run-name",
        "save-strategy",
        "save-total-limit",
        "temperature",
        "top-k",
        "top-p",
        "wandb-project",
        "warmup",
        "warmup-ratio",
        "warmup-steps",
        "weight-decay",
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
_LENGTHS = "`--lengths data.jsonl` reads the lengths of your texts"
INSTEAD = {
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
# Trainers that extend the Trainer of transformers, as TRL's does.
EXTEND_TRAINER = frozenset(("axolotl", "llama-factory", "llamafactory", "ms-swift", "swift"))

__all__ = [
    "EXTEND_TRAINER",
    "INSTEAD",
    "NO_OBJECTIVE",
    "OBJECTIVES",
    "SWITCHES",
    "WITHOUT_EFFECT",
]
