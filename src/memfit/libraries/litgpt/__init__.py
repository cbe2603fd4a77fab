"""litgpt: its own models, adapters and generation."""
