"""torchtune: its own models and losses."""
