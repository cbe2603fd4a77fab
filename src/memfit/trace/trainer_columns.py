"""Columns that TRL's trainers and their reward functions ask for, in a data set that neither is
there nor is known."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from memfit.trace import streamed_columns
from memfit.trace.asked_columns import Columns, kind_of, marked
from memfit.trace.imports import Change, Patch

PREFERENCE = {"prompt": "prompt", "chosen": "answer", "rejected": "answer"}
PROMPT = {"prompt": "prompt"}
TAUGHT = {"prompt": "prompt", "privileged_context": "text"}
STEPS = {"prompt": "text", "completions": "steps", "labels": "judged"}
# What each trainer reads (TRL 1.16, docs/source/dataset_formats.md): module and class, columns
# and their kinds. A trainer for texts reads `text`, which every such data set has.
TRAINERS = {
    "trainer.dpo_trainer.DPOTrainer": PREFERENCE,
    "trainer.reward_trainer.RewardTrainer": PREFERENCE,
    "trainer.kto_trainer.KTOTrainer": {"prompt": "prompt", "completion": "answer", "label": "bool"},
    "trainer.grpo_trainer.GRPOTrainer": PROMPT,
    "trainer.rloo_trainer.RLOOTrainer": PROMPT,
    "trainer.distillation_trainer.DistillationTrainer": {"messages": "messages"},
    "trainer.orpo_trainer.ORPOTrainer": PREFERENCE,
    "trainer.cpo_trainer.CPOTrainer": PREFERENCE,
    "experimental.orpo.orpo_trainer.ORPOTrainer": PREFERENCE,
    "experimental.cpo.cpo_trainer.CPOTrainer": PREFERENCE,
    "experimental.tpo.tpo_trainer.TPOTrainer": PREFERENCE,
    "experimental.online_dpo.online_dpo_trainer.OnlineDPOTrainer": PROMPT,
    "experimental.gkd.gkd_trainer.GKDTrainer": {"messages": "messages"},
    "experimental.gold.gold_trainer.GOLDTrainer": {"messages": "messages"},
    "experimental.bco.bco_trainer.BCOTrainer": {
        "prompt": "prompt",
        "completion": "answer",
        "label": "bool",
    },
    "experimental.sdft.sdft_trainer.SDFTTrainer": TAUGHT,
    "experimental.sdpo.sdpo_trainer.SDPOTrainer": TAUGHT,
    "experimental.ssd.ssd_trainer.SSDTrainer": PROMPT,
    "trainer.prm_trainer.PRMTrainer": STEPS,
    "experimental.prm.prm_trainer.PRMTrainer": STEPS,
    "trainer.sft_trainer.SFTTrainer": {},
}
SEEN = {"messages": "messages", "image": "image"}  # by a model with a vision tower
# What a trainer itself hands to a reward function (TRL 1.16, trainer/grpo_trainer.py
# `_calculate_rewards`).
GIVEN = {
    "self",
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
}


def rewarded(functions: Any) -> Iterator[str]:
    """Columns that reward functions name, as parameters or in their keyword arguments."""
    listed = functions if isinstance(functions, (list, tuple)) else [functions]
    for one in listed:
        if not inspect.isfunction(one) and not inspect.ismethod(one):
            continue
        for name, parameter in inspect.signature(one).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                yield from named_in(one, name)
            elif parameter.kind is not parameter.VAR_POSITIONAL and name not in GIVEN:
                yield name


def named_in(function: Any, keywords: str) -> Iterator[str]:
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        return
    found = re.findall(rf"\b{keywords}(?:\.get\(|\[)\s*[\"'](\w+)[\"']", text)
    yield from (one for one in found if one not in GIVEN)


def sees(given: dict[str, Any]) -> bool:
    processor, model = given.get("processing_class"), given.get("model")
    tower = hasattr(getattr(model, "config", None), "vision_config")
    return hasattr(processor, "image_processor") or (processor is None and tower)


def wanted(kinds: dict[str, str], given: dict[str, Any]) -> dict[str, str]:
    named = {name: kind_of(name) for name in rewarded(given.get("reward_funcs") or [])}
    return {**named, **kinds, **(SEEN if not kinds and sees(given) else {})}


def asking(true: Callable[..., None], kinds: dict[str, str], columns: Columns) -> Any:
    signature = inspect.signature(true)

    @functools.wraps(true)
    def init(self: Any, *args: Any, **given: Any) -> None:
        bound = signature.bind_partial(self, *args, **given)
        named = bound.arguments
        own = named.get("data_collator") is not None  # that of the script reads what it wants
        added = {} if own and not kinds else wanted(kinds, named)
        for name in ("train_dataset", "eval_dataset"):
            found = named.get(name)
            if isinstance(found, dict):
                named[name] = type(found)({key: grow(columns, found[key], added) for key in found})
            elif found is not None:
                named[name] = grow(columns, found, added)
        true(*bound.args, **bound.kwargs)

    return init


def grow(columns: Columns, data: Any, kinds: dict[str, str]) -> Any:
    """What the script has made itself says of which form the others are: messages or texts."""
    if not hasattr(data, "_info") or not marked(data):
        return data
    row: dict[str, Any] = next(iter(data), {})
    there = set(row) & set(kinds)
    if "input_ids" in row:
        return data
    if "chosen" in kinds and "label" in row:  # which TRL takes for a data set of another kind
        data = data.remove_columns("label")
    plain = any(isinstance(row[name], str) for name in there)
    paired = {"chosen", "rejected"} <= there  # their common beginning may be the prompt
    said = {
        name: "text" if plain and kind in ("prompt", "answer") else kind
        for name, kind in kinds.items()
        if name != "prompt" or not paired
    }
    if not hasattr(data, "_data"):
        return streamed_columns.grown(data, said, columns)
    for name, kind in said.items():
        columns.grow(data, name, kind)
    return data


def changes(columns: Columns) -> dict[str, Change]:
    def change(name: str, kinds: dict[str, str]) -> Change:
        def changed(module: ModuleType) -> list[Patch]:
            kind = getattr(module, name, None)
            if kind is None:
                return []
            return [(kind, "__init__", asking(kind.__init__, kinds, columns))]

        return changed

    return {
        f"trl.{place.rpartition('.')[0]}": change(place.rpartition(".")[2], kinds)
        for place, kinds in TRAINERS.items()
    }


__all__ = ["changes"]
