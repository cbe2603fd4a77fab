"""Compares a family of decoders that was just made with the real code: parameters tensor by tensor,
and peaks with the trace's on sizes and layers that no graph was captured with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.simulate.memory import memory
from memfit.trace import trace_config
from memfit.trace.family_check import WORST, fault, model_of, unlike_parameters

HEAD, HEADS = "causal-lm", "num_attention_heads"
TRAINED: tuple[dict[str, Any], ...] = (
    {"batch": 2, "seq": 200, "optimizer": "sgd"},
    {"batch": 3, "seq": 150, "packing": False, "precision": "autocast-bf16"},
    {"batch": 2, "seq": 120, "packing": False, "precision": "bf16-autocast", "method": "lora"},
    {"batch": 1, "seq": 331, "checkpointing": "full", "precision": "autocast-bf16"},
    {"batch": 2, "seq": 90, "packing": False, "optimizer": "sgd", "framework": "trl"},
    {"batch": 1, "seq": 3300, "optimizer": "sgd"},  # what is picked may not grow with it
)
GENERATED: tuple[dict[str, Any], ...] = (
    {"batch": 9, "seq": 700, "new_tokens": 6},
    {"batch": 40, "seq": 64, "new_tokens": 12},
)
PACKED: tuple[dict[str, Any], ...] = (
    {"batch": 2, "seq": 200, "method": "qlora", "checkpointing": "full"},
    {"batch": 40, "seq": 64, "new_tokens": 4, "quant": "nf4", "task": "inference"},
)
CUT = 71  # a window that is less than sequences
SPREAD = {"batch": 2, "seq": 120, "optimizer": "sgd"}, {"batch": 2, "seq": 96, "packing": False}


def unseen(data: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """A config with sizes that were not captured and twice as many layers, whose head is tied as
    the class says."""
    base = data["base"]
    lists = {key: 2 * list(base[key]) for key in data["kinds"]["lists"]}
    return {
        "model_type": data["type"],
        **base,
        **sizes,
        **lists,
        data["layers"]: 2 * base[data["layers"]],
        "tie_word_embeddings": data["tied"],
        "dtype": "bfloat16",
        "architectures": [],
    }


def parameters_fault(config: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """The first parameter that is not transformers' own, tied or not."""
    for tied in (True, False):
        head = next(iter(data.get("heads", ())), HEAD)
        name = unlike_parameters({**config, "tie_word_embeddings": tied}, head)
        if name:
            return f"`{name}` is not as in transformers"
    return ""


def peaks_fault(config: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """What is wrong with the answer to one of the jobs; empty where nothing is."""
    checkpoints = data.get("checkpoints", True)  # TRL's defaults have them
    trained = [
        one
        for one in TRAINED
        if checkpoints or not ("checkpointing" in one or one.get("framework") == "trl")
    ]
    jobs = [*trained, *({**one, "task": "inference"} for one in GENERATED)]
    found = first_fault(config, jobs)
    if found or not data["window"]:
        return found
    cut = {**config, data["window"]: CUT}
    return first_fault(cut, [*SPREAD, {**GENERATED[0], "task": "inference"}])


def first_fault(config: Mapping[str, Any], jobs: Any) -> str:
    for case in jobs:
        serves = case.get("task") == "inference"
        found = served_fault(config, Job(**case)) if serves else fault(config, Job(**case))
        if found:
            return f"{found} ({', '.join(f'{key} {value}' for key, value in case.items())})"
    return ""


def served_fault(config: Mapping[str, Any], job: Job) -> str:
    """The same of generation, of which the trace runs every token."""
    try:
        ours = memory(lower(model_of(config, job.head), job))
        theirs = memory(trace_config(config, job, decode_all=True))
    except InputError as bad:
        return bad.problems[0].message
    share = ours.allocated / theirs.allocated - 1
    if abs(share) > WORST:
        return f"its peak is {share:+.2%} off the trace's"
    same = ours.parts.get("kv_cache", 0) == theirs.parts.get("kv_cache", 0)
    return "" if same else "its cache is not the trace's"


def unlike_pairs(config: Mapping[str, Any], data: Mapping[str, Any]) -> list[list[str]]:
    """Sizes of which one divides the other, and which must not be equal: other code runs then."""
    found = []
    for large, small in data["ratios"]:
        if large != HEADS:
            continue
        equal = {**config, data["dims"][small]: config[data["dims"][large]]}
        if first_fault(equal, [*TRAINED[:2], {**GENERATED[0], "task": "inference"}]):
            found.append([large, small])
    return found


def packs(config: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
    """Whether packed weights are answered as the trace does."""
    plain = {} if data.get("checkpoints", True) else {"checkpointing": "none"}
    return not first_fault(config, [{**one, **plain} for one in PACKED])


__all__ = ["packs", "parameters_fault", "peaks_fault", "unlike_pairs", "unseen"]
