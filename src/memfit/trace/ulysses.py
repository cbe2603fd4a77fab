"""DeepSpeed's Ulysses attention on the pretended GPU: the attention that transformers calls
exchanges tokens for heads around its kernel (tried with deepspeed 0.19.8
runtime/sequence_parallel/ulysses_sp.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from memfit.job import Job
from memfit.strategy import Strategy
from memfit.tape import Comm
from memfit.trace.recorder import Recorder
from memfit.trace.rules import NO, RULES


def ranks(strategy: Strategy) -> int:
    cp = strategy.cp
    return 1 if cp is None or cp.style != "ulysses" else cp.size


def registered(recorder: Recorder, model: Any, job: Job, strategy: Strategy) -> dict[str, Any]:
    """What `deepspeed.initialize` is told beside (accelerate 1.15 accelerator.py
    `_prepare_deepspeed`)."""
    size = ranks(strategy)
    if size == 1:
        return {}
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    RULES.setdefault(torch.ops.deepspeed.dim_zero_all_to_all.default, exchanged)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    groups = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=model.config._attn_implementation,
        sequence_parallel_size=size,
        micro_batch_size=job.batch,
        seq_length_is_variable=True,
        disable_in_eval=True,
    )
    recorder.groups[groups.get_sequence_parallel_group().group_name] = "cp"
    return {"mpu": groups}


@contextlib.contextmanager
def left_alone(strategy: Strategy) -> Iterator[list[Any]]:
    """The modules that keep groups; transformers' attention is its own again afterwards."""
    if ranks(strategy) == 1:
        yield []
        return
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    try:
        yield [parallel_state_sp]
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
        ALL_ATTENTION_FUNCTIONS._local_mapping.update(known)


def exchanged(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """An operator of DeepSpeed's own, whose collective no dispatcher sees."""
    given, group = args[:2]
    if not given.is_meta:
        return NO
    where = recorder.modules[-1] if recorder.modules else recorder.last_node[1]
    size = given.numel() * given.element_size()
    recorder.events.append(
        Comm(
            "all_to_all",
            size,
            given.shape[0],
            recorder.groups.get(group, group),
            where,
            recorder.stream,
        )
    )
    return True, torch.empty_like(given)


def part(given: dict[str, Any], strategy: Strategy) -> dict[str, Any]:
    """A batch of this rank's tokens, as the loader hands it over, with the positions that they have
    in the whole and shifted labels (`UlyssesSPDataLoaderAdapter`; transformers 5.23
    integrations/deepspeed.py deepspeed_sp_compute_loss)."""
    tokens = given["input_ids"]
    first = strategy.rank % ranks(strategy) * tokens.shape[1]
    given["position_ids"] = torch.arange(
        first, first + tokens.shape[1], device=tokens.device
    ).repeat(tokens.shape[0], 1)
    given["shift_labels"] = given["labels"]
    if (strategy.rank + 1) % ranks(strategy) == 0:
        given["labels"] = given["shift_labels"] = torch.nn.functional.pad(
            given["labels"][:, 1:], (0, 1), value=-100
        )
    return given


__all__ = ["left_alone", "part", "ranks", "registered"]
