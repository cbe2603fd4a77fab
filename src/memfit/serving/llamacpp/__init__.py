"""llama.cpp and Ollama: buffers of weights, caches and graphs by the rules of their own code."""

from __future__ import annotations

from memfit.serving.llamacpp.engine import LlamaCpp

ENGINE = LlamaCpp()

__all__ = ["ENGINE"]
