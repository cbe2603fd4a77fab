"""PEFT: LoRA adapters."""
