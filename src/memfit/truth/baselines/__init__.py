"""Known ways of estimating, each from its published description, to be compared with and never used
in an estimate."""

from memfit.truth.baselines import dnnmem, eleutherai, llmem, megatron, rules
from memfit.truth.baselines.base import Baseline

BASELINES: tuple[Baseline, ...] = (
    rules.TWO_FOUR,
    rules.EIGHT,
    eleutherai.BASELINE,
    llmem.BASELINE,
    dnnmem.BASELINE,
    megatron.BASELINE,
)

__all__ = ["BASELINES", "Baseline"]
