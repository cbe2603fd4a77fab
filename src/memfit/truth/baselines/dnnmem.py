"""A walk over the graph in the manner of DNNMem (Gao et al., ESEC/FSE 2020, doi
10.1145/3368089.3417050): weights, their gradients, optimizer states, the output of every operator
kept for backward, the largest gradients on the way, and the context.

It knows neither recomputation nor what a kernel really saves, and the graph here is that of the
modules.
"""

from __future__ import annotations

from memfit.hardware import GPU, context
from memfit.job import Job
from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Block, Latent, Linear, MoE
from memfit.optimizers import OPTIMIZERS
from memfit.truth.baselines.base import Baseline, width


def estimate(model: Model, job: Job, gpu: GPU | None) -> int | None:
    if not job.training or job.method != "full":
        return None
    size = width(job)
    outputs = [model.width * job.batch * job.seq * size for _ in model.embed]
    for layer in model.layers:
        for block in layer.blocks:
            outputs += [count * size for count in block_outputs(block, job, model.width)]
    logits = model.vocab * job.batch * job.seq * size
    outputs += [model.width * job.batch * job.seq * size, logits, logits]
    states = len(OPTIMIZERS[job.optimizer].states)
    span = context(gpu) if gpu is not None else None
    outside = (span.low + span.high) // 2 if span is not None else 0
    return model.parameters * size * (2 + states) + sum(outputs) + 2 * max(outputs) + outside


def block_outputs(block: Block, job: Job, width: int) -> list[int]:
    """Values that each operator of a block puts out."""
    tokens = job.batch * job.seq
    mixer = block.mixer
    found = [tokens * width, tokens * width]  # norm, residual
    found += [tokens * linear.outputs for linear in mixer.linears() if isinstance(linear, Linear)]
    if isinstance(mixer, Attention):
        found += (
            [tokens * mixer.heads * mixer.head, tokens * mixer.kv_heads * mixer.head]
            if mixer.rotary
            else []
        )
        found.append(tokens * mixer.heads * mixer.head)
        found += [mixer.heads * tokens * job.seq] * 2 if job.attention in ("eager", "math") else []
    elif isinstance(mixer, Latent):
        found.append(tokens * mixer.heads * mixer.value)
    elif isinstance(mixer, MLP):
        found += [tokens * mixer.width] * (2 if mixer.gate is not None or mixer.fused else 1)
    elif isinstance(mixer, MoE):
        found += [
            tokens * mixer.active * each
            for each in (2 * mixer.width, mixer.width, mixer.width, width)
        ]
    return found


BASELINE = Baseline(
    name="DNNMem-style",
    cite="Gao et al., Estimating GPU Memory Consumption of Deep Learning Models, ESEC/FSE 2020",
    estimate=estimate,
)
