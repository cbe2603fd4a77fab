"""transformers: what its code does with mixtures of experts."""
