"""EleutherAI's closed form, as its calculator has it (EleutherAI/cookbook
calc/calc_transformer_mem.py at 827ee3b; blog "Transformer Math 101").

Weights 2 bytes (4 in fp32), gradients 4, AdamW 12; activations after Korthikanti et al. (arXiv
2205.05198, table 2). Parameters are counted exactly here, which favours it.
"""

from __future__ import annotations

from memfit.hardware import GPU
from memfit.job import Job
from memfit.model.model import Model
from memfit.model.modules import Attention, Latent
from memfit.truth.baselines.base import Baseline, width

LOW = 2  # bytes of a value in low precision
OPTIMIZERS = {
    "adamw": 12,
    "adamw_fused": 12,
    "adamw_loop": 12,
    "adam": 12,
    "adam_fused": 12,
    "sgd_momentum": 8,
}


def estimate(model: Model, job: Job, gpu: GPU | None) -> int | None:
    tokens, layers, heads = job.batch * job.seq, len(model.layers), attention_heads(model)
    linear = tokens * model.width * (16 * LOW + 2)
    weights = model.parameters * width(job)
    if not job.training:
        if job.quantization != "none":
            return None
        cache = LOW * model.width * layers * (job.seq + job.new_tokens) * job.batch
        return weights + linear + cache
    if job.method != "full" or job.optimizer not in OPTIMIZERS:
        return None
    activations = linear * layers
    if job.checkpointing == "none":
        activations += tokens * job.seq * heads * layers * (2 * LOW + 1)
    return weights + model.parameters * (4 + OPTIMIZERS[job.optimizer]) + activations


def attention_heads(model: Model) -> int:
    mixers = (block.mixer for layer in model.layers for block in layer.blocks)
    return next((mixer.heads for mixer in mixers if isinstance(mixer, (Attention, Latent))), 0)


BASELINE = Baseline(
    name="EleutherAI",
    cite="EleutherAI/cookbook calc/calc_transformer_mem.py @827ee3b",
    estimate=estimate,
)
