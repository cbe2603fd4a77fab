"""Megatron-LM's theoretical memory under the rule of Fujii, Watanabe and Yokota (arXiv 2411.06465):
what is estimated below 80 % of the GPU never ran out of memory in their 454 runs with data, tensor,
pipeline and context parallelism.

States: bf16 weight 2, fp32 gradient 4, fp32 master and Adam 12, these shared out over replicas by
the distributed optimizer (their estimator, tools/memory_estimate/memory_consumption_estimator.py of
okoge-kaz/Megatron-LM, has the same). Activations of a layer with fused attention: T·D·(18 + 4·F/D)
bytes, head and loss T·D·4·(1 + V/D) where there is no pipeline; the first stage holds as many
micro-batches as there are stages (Megatron-LM megatron/training/theoretical_memory_usage.py).
Sequence parallelism divides them by tensor ranks, and context parallelism the tokens.
"""

from __future__ import annotations

from memfit.hardware import GPU
from memfit.job import Job
from memfit.model.model import Model
from memfit.model.modules import MLP, MoE
from memfit.strategy import ONE, Strategy
from memfit.truth.baselines.base import Baseline


def estimate(model: Model, job: Job, gpu: GPU | None) -> int | None:
    return spread(model, job, gpu, ONE)


def spread(model: Model, job: Job, gpu: GPU | None, strategy: Strategy) -> int | None:
    """Of the first stage, the most loaded."""
    if not job.training or job.method != "full" or not job.optimizer.startswith("adam"):
        return None
    if not {name for name, _ in strategy.uses()} <= {"ddp", "tp", "pp", "cp"}:
        return None
    tensors, stages, rings, replicas = (strategy.size(name) for name in ("tp", "pp", "cp", "ddp"))
    ends = ends_of(model)
    weights = (
        (model.parameters - sum(ends)) // stages + (ends[0] if stages > 1 else sum(ends))
    ) // tensors
    shared = replicas * rings if strategy.ddp is not None and strategy.ddp.distributed else 1
    tokens, inner = job.batch * job.seq // rings, feed_forward(model)
    layer = tokens * (18 * model.width + 4 * inner)
    kept = (
        2 * tokens * model.width * len(model.layers) + layer
        if job.checkpointing == "full"
        else layer * len(model.layers)
    )
    kept = kept * min(stages, job.accumulate) // stages
    ahead = 4 * tokens * (model.width + model.vocab) if stages == 1 else 0
    return weights * 6 + weights * 12 // shared + (kept + ahead) // tensors


def ends_of(model: Model) -> tuple[int, int]:
    """Weights of the embedding, and of a head that is not the embedding."""
    embed = sum(weight.count for module in model.embed for weight in module.weights())
    return embed, 0 if model.tied else model.head.inputs * model.head.outputs


def feed_forward(model: Model) -> int:
    mixers = [block.mixer for layer in model.layers for block in layer.blocks]
    return max(
        (
            mixer.width if isinstance(mixer, MLP) else mixer.active * mixer.width
            for mixer in mixers
            if isinstance(mixer, (MLP, MoE))
        ),
        default=0,
    )


BASELINE = Baseline(
    name="Megatron, 80 %",
    cite="Fujii et al., arXiv 2411.06465; Megatron-LM theoretical_memory_usage.py",
    estimate=estimate,
    margin=0.8,
    spread=spread,
)
