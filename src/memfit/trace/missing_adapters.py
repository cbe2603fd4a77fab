"""Adapters of PEFT's that a script loads by name and that are not there: LoRA of a rank that the
name may say, without trained values."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from memfit.trace import failures
from memfit.trace.imports import Change, Patch
from memfit.trace.refuse import Watcher

RANK = re.compile(r"(?:^|[-_/])(?:r(?:ank)?[-_=]?(\d+)|(\d+)[-_]?rank)(?=[-_/]|$)", re.IGNORECASE)
USUAL, LEAST = 16, 4  # the rank of most guides; R1 is a model


def rank_of(name: str) -> int:
    found = [int(one[1] or one[2]) for one in RANK.finditer(name)]
    return max((one for one in found if one >= LEAST), default=USUAL)


def changes(recorder: Watcher) -> dict[str, Change]:
    def configs(module: ModuleType) -> list[Patch]:
        kind = module.PeftConfigMixin
        type_of, whole = kind._get_peft_type.__func__, kind.from_pretrained.__func__

        def peft_type(cls: Any, model_id: Any, **given: Any) -> Any:
            try:
                return type_of(cls, model_id, **given)
            except Exception as bad:
                if not lacks(bad):
                    raise
                return "LORA"

        def from_pretrained(cls: Any, name: Any, *args: Any, **given: Any) -> Any:
            try:
                return whole(cls, name, *args, **given)
            except Exception as bad:
                if not lacks(bad):
                    raise
            import peft

            rank = rank_of(str(name))
            message = (
                f"the adapter `{name}` was not found: it is assumed to be LoRA of rank {rank} on "
                "all linear layers"
            )
            recorder.note(f"adapter {name}", message, "give the folder of the true one")
            return peft.LoraConfig(
                r=rank, target_modules="all-linear", base_model_name_or_path=str(name)
            )

        return [
            (kind, "_get_peft_type", classmethod(peft_type)),  # type: ignore[arg-type]
            (kind, "from_pretrained", classmethod(from_pretrained)),
        ]

    def weights(module: ModuleType) -> list[Patch]:
        true = module.load_peft_weights

        def load_peft_weights(model_id: Any, *args: Any, **given: Any) -> Any:
            try:
                return true(model_id, *args, **given)
            except Exception as bad:
                if not lacks(bad):
                    raise
                return {}  # they stay as they were made

        return [(module, "load_peft_weights", load_peft_weights)]

    return {"peft.config": configs, "peft.utils.save_and_load": weights}


def lacks(bad: Exception) -> bool:
    """Whether a file was not found, in PEFT's words or in the hub's."""
    return failures.missing_file(bad) is not None or str(bad).startswith("Can't find")


__all__ = ["changes"]
