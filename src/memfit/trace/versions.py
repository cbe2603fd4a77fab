"""What the installed versions call the same thing."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from memfit.job import Job


def installed(library: str) -> tuple[int, int]:
    """(major, minor); (0, 0) where it is not installed."""
    try:
        major, minor = importlib.metadata.version(library).split(".")[:2]
        return int(major), int(minor)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return 0, 0


TRANSFORMERS = installed("transformers")
DTYPE = (
    "dtype" if TRANSFORMERS >= (4, 56) else "torch_dtype"
)  # the argument of `from_config` and `_from_config`


def text_config(config: Any) -> Any:
    """Configurations have `get_text_config` since transformers 4.45."""
    return (
        config.get_text_config()
        if hasattr(config, "get_text_config")
        else getattr(config, "text_config", config)
    )


def vocabulary(config: Any) -> int:
    """Of the text model; 0 where it reads characters, and has none."""
    return int(getattr(text_config(config), "vocab_size", None) or 0)


def kept_whole(model: Any, named: list[str]) -> list[str]:
    """The modules that bitsandbytes' quantization leaves alone: those named, else the head and what
    is tied to it, and those of fp32.

    transformers 4.50 and later quantizers/base.py; before, quantizers/quantizer_bnb_4bit.py.
    """
    wide = list(model._keep_in_fp32_modules or ())
    if TRANSFORMERS >= (4, 50):
        from transformers.quantizers.base import HfQuantizer

        found: list[str] = HfQuantizer.get_modules_to_not_convert(model, named or None, wide)
        return found
    from transformers.integrations.bitsandbytes import get_keys_to_not_convert

    return [*(named or get_keys_to_not_convert(model)), *wide]


def converts(path: str, kept: list[str]) -> bool:
    """Whether the linear layer at `path` is quantized."""
    if TRANSFORMERS >= (5, 0):
        from transformers.quantizers.quantizers_utils import should_convert_module

        return bool(should_convert_module(path, kept))
    name = path.rpartition(".")[
        2
    ]  # transformers 4 integrations/bitsandbytes.py `_replace_with_bnb_linear`
    return name not in kept and not any(f"{one}." in path or one == path for one in kept)


__all__ = [
    "DTYPE",
    "TRANSFORMERS",
    "converts",
    "installed",
    "kept_whole",
    "text_config",
    "vocabulary",
]


def cache_off(job: Job) -> bool:
    """Whether the loop around the model switches the key/value cache off: a Trainer since 5.0
    (trainer.py), TRL since 0.22 (sft_trainer.py)."""
    if job.keep_outputs:
        return False
    return TRANSFORMERS >= (5, 0) or (job.framework == "trl" and job.version("trl") >= (0, 22))
