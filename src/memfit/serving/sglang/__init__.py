"""SGLang: weights as it loads them, and pools of what `mem_fraction_static` leaves."""

from __future__ import annotations

from memfit.serving.sglang.engine import SGLang

ENGINE = SGLang()

__all__ = ["ENGINE"]
