"""What a forward pass needs to know beside weights and input."""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.formats import Format
from memfit.job import Job
from memfit.lower.cache import Cache
from memfit.lower.recorder import Dim, Recorder, Tensor


@dataclass(slots=True, kw_only=True)
class Context:
    """One pass: its job, its sizes, the device it runs on, and the tensors that all layers share."""

    r: Recorder
    job: Job
    batch: Dim
    tokens: Dim  # of one sequence, in this pass
    keys: int  # keys that attention sees: past and present
    training: bool
    format: Format  # of activations between layers
    autocast: Format | None = None
    capability: tuple[int, int] = (8, 0)
    sms: int = 108
    torch: tuple[int, int] = (2, 13)
    cos: Tensor | None = None
    sin: Tensor | None = None
    masks: dict[int, Tensor | None] = field(default_factory=dict)  # by window
    casts: dict[int, Tensor] = field(default_factory=dict)  # autocast's cache of cast weights
    cache: Cache | None = None

    def dropout(self, p: float) -> float:
        return p if self.training else 0.0
