"""torchtitan: its own models and mixtures of experts."""
