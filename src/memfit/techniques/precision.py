"""In which numbers the weights are kept and the products are made."""

from __future__ import annotations

from memfit.program import Program
from memfit.techniques.base import Technique

WEIGHTS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "autocast-bf16": "float32",
    "autocast-fp16": "float32",
    "bf16-autocast": "bfloat16",
    "fp16-autocast": "float16",
    "bf16-master": "bfloat16",
}
AUTOCAST = {
    "autocast-bf16": "bfloat16",
    "autocast-fp16": "float16",
    "bf16-autocast": "bfloat16",
    "fp16-autocast": "float16",
}


def apply(program: Program) -> Program:
    precision = program.job.precision
    return program.replace(
        weights=WEIGHTS[precision],
        autocast=AUTOCAST.get(precision, ""),
        master=precision == "bf16-master",
    )


TECHNIQUE = Technique(
    name="precision",
    order=30,
    cite="torch 2.13 torch/amp; transformers 5.23 training_args.py",
    wanted=lambda job: True,
    apply=apply,
)
