"""TRL: SFTTrainer's own heads."""
