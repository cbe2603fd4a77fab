"""Megatron-LM's theoretical memory under the rule of Fujii, Watanabe and Yokota (arXiv 2411.06465): what is estimated below 80 % of the GPU
never ran out of memory in their 454 runs. Their own formulas refine these for 4D parallelism; on one GPU the states are the same 18 bytes.

States: bf16 weight 2, fp32 gradient 4, fp32 master and Adam 12. Activations of a layer with fused attention: T·D·(18 + 4·F/D) bytes, and
head and loss T·D·4·(1 + V/D) (Megatron-LM megatron/training/theoretical_memory_usage.py).
"""

from __future__ import annotations

from memfit.hardware import GPU
from memfit.job import Job
from memfit.model.modules import MLP, Model, MoE
from memfit.truth.baselines.base import Baseline

STATES = 18


def estimate(model: Model, job: Job, gpu: GPU | None) -> int | None:
    if not job.training or job.method != "full" or not job.optimizer.startswith("adam"):
        return None
    tokens, inner = job.batch * job.seq, feed_forward(model)
    layer = tokens * (18 * model.width + 4 * inner)
    kept = 2 * tokens * model.width * len(model.layers) + layer if job.checkpointing == "full" else layer * len(model.layers)
    return STATES * model.parameters + kept + 4 * tokens * (model.width + model.vocab)


def feed_forward(model: Model) -> int:
    mixers = [block.mixer for layer in model.layers for block in layer.blocks]
    return max(
        (mixer.width if isinstance(mixer, MLP) else mixer.active * mixer.width for mixer in mixers if isinstance(mixer, (MLP, MoE))),
        default=0,
    )


BASELINE = Baseline(
    name="Megatron, 80 %", cite="Fujii et al., arXiv 2411.06465; Megatron-LM theoretical_memory_usage.py", estimate=estimate, margin=0.8
)
