"""ColossalAI's Gemini: parameters in chunks, and its 1D tensor parallelism."""
