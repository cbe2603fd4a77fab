"""A draft model beside the model (`-md`): weights and a context of its own.

Builds before pull request 22838 (May 2026, build 9080 or so) have a draft context of one sequence
for each slot, with batches as long as itself (server.cpp `cparams_dft`); since then one context
serves all slots and is as long as the model's (speculative.cpp common_speculative_init_result).
Its cache has 16 bits unless `-ctkd` and `-ctvd` say otherwise, whatever the model's has.
"""

from __future__ import annotations

from dataclasses import replace

from memfit.lazy_dataclass import dataclass
from memfit.serving.llamacpp.model import GgufModel
from memfit.serving.llamacpp.settings import Settings

ONE_CONTEXT = 9080


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The draft model and what its own flags say."""

    model: GgufModel
    gpu_layers: int = 10**6  # -ngld
    cache_k: str = "f16"  # -ctkd
    cache_v: str = "f16"  # -ctvd
    context: int = 0  # -cd, up to build 9080; 0: a slot's
    device: int = -1  # -devd; -1: as the model

    def settings(self, beside: Settings) -> Settings:
        """Of one draft context."""
        own = replace(
            beside,
            draft=None,
            drafted=0,
            gpu_layers=self.gpu_layers,
            cache_k=self.cache_k,
            cache_v=self.cache_v,
            cpu_moe=0,
            overrides=(),
            split=beside.split if self.device < 0 else (),
            embedding=False,
        )
        if beside.build >= ONE_CONTEXT:
            return own
        context = self.context or beside.context // beside.parallel
        return replace(own, context=context, batch=context, parallel=1, unified=False)

    def contexts(self, beside: Settings) -> int:
        return 1 if beside.build >= ONE_CONTEXT else beside.parallel
