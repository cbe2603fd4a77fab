"""Commands of trainers that are not installed: the question to ask memfit without them, with what
their options and their YAML file say."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FRAMEWORKS = {
    "tune": "torchtune",
    **dict.fromkeys(("autotrain", "axolotl", "llamafactory-cli", "oumi", "swift", "trl"), "trl"),
}
# Keys of trainers' files and options (axolotl 0.12, LLaMA-Factory 0.9, ms-swift 3).
MODEL = ("base_model", "model_name_or_path", "model_id", "model")
METHOD = ("adapter", "finetuning_type", "train_type", "tuner_type")
PACKED = ("load_in_4bit", "quantization_bit", "quant_bits")
SIZES = {
    "--seq": ("sequence_len", "cutoff_len", "max_length", "max_seq_len"),
    "--batch": ("micro_batch_size", "per_device_train_batch_size", "batch_size"),
}
ADAPTERS = ("llamafactory-cli", "swift")  # which train LoRA where nothing else is said
LONGEST = 1 << 16  # bytes of a file


def question(name: str, words: Sequence[str]) -> str:
    """`memfit estimate …` for what the command would train."""
    said = {**in_file(words), **in_options(words)}
    model = next((said[one] for one in MODEL if isinstance(said.get(one), str)), "MODEL")
    asked = ["memfit", "estimate", model]
    if name in FRAMEWORKS:
        asked += ["--framework", FRAMEWORKS[name]]
    asked += ["--method", method(name, said, words)]
    for flag, keys in SIZES.items():
        value = next((said[one] for one in keys if str(said.get(one, "")).isdecimal()), None)
        asked += [] if value is None else [flag, str(value)]
    return shlex.join(asked)


def method(name: str, said: dict[str, Any], words: Sequence[str]) -> str:
    text = next((str(said[one]).lower() for one in METHOD if said.get(one)), "")
    recipe = " ".join(words[:3]).lower() if name in ("tune", "litgpt") else ""
    named = text or recipe or ("lora" if name in ADAPTERS else "")
    packed = any(said.get(one) not in (None, False, "false", 0) for one in PACKED)
    if "qlora" in named or ("lora" in named and packed):
        return "qlora"
    return "lora" if "lora" in named else "full"


def in_options(words: Sequence[str]) -> dict[str, Any]:
    """`--key value` and `key=value`."""
    found: dict[str, Any] = {}
    for word, following in itertools.pairwise((*words, "")):
        key, equals, value = word.lstrip("-").partition("=")
        if equals or word.startswith("--"):
            found[key.replace("-", "_")] = value if equals else following
    return found


def in_file(words: Sequence[str]) -> dict[str, Any]:
    """What a YAML file that is named holds."""
    import yaml

    for word in words:
        path = Path(word)
        if path.suffix in (".yaml", ".yml") and path.is_file() and path.stat().st_size <= LONGEST:
            try:
                found = yaml.safe_load(path.read_text(errors="replace"))
            except (OSError, yaml.YAMLError):
                return {}
            return found if isinstance(found, dict) else {}
    return {}


__all__ = ["question"]
