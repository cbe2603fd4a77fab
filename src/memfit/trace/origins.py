"""Which blocks are there only because there are many ranks: known by the function of torch that
asks for them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

from memfit.tape import Part

# (file, function or "" for all of them) -> part; torch 2.13. Gathered weights and what carries them
# there are communication.
HOMES: dict[tuple[str, str], Part] = {
    ("_fsdp_collectives.py", ""): "communication",
    ("_fsdp_param.py", "init_all_gather_outputs"): "communication",
    ("_fsdp_param.py", "alloc_all_gather_outputs"): "communication",
    ("_fsdp_param.py", "all_gather_inputs"): "communication",
    ("_fsdp_param.py", "init_unsharded_param"): "communication",
    ("_fsdp_param.py", "to_sharded_post_forward"): "communication",
    ("_fsdp_param.py", "to_accumulated_grad_if_needed"): "gradients",
    ("_fsdp_param.py", "accumulate_unsharded_grad_if_needed"): "gradients",
    ("_flat_param.py", ""): "communication",
    ("_runtime_utils.py", "_post_backward_hook"): "communication",
    ("_runtime_utils.py", "_reduce_grad"): "communication",
    ("distributed.py", "_build_params_for_reducer"): "communication",
    ("distributed.py", "_ddp_init_helper"): "communication",
    ("distributed.py", "_pre_forward"): "communication",
    ("distributed_c10d.py", ""): "communication",
    ("utils.py", "_sync_params_and_buffers"): "communication",
    ("_functional_collectives.py", ""): "communication",
}
# The same of deepspeed 0.19.8; what it gathers for a moment is communication.
ENGINE: dict[tuple[str, str], Part] = {
    ("engine.py", "_configure_distributed_model"): "weights",
    ("stage_1_and_2.py", "__init__"): "weights",
    ("stage_1_and_2.py", "initialize_optimizer_states"): "gradients",
    ("stage_1_and_2.py", "setup_buckets"): "communication",
    ("stage_1_and_2.py", "allreduce_bucket"): "communication",
    ("stage_1_and_2.py", "allreduce_and_copy_with_multiple_ranks"): "communication",
    ("stage_1_and_2.py", "copy_grads_in_partition"): "gradients",
    ("partition_parameters.py", ""): "communication",
    ("partition_parameters.py", "_partition_param"): "weights",
    ("partition_parameters.py", "_partition_param_sec"): "weights",
    ("partition_parameters.py", "_convert_to_zero_parameters"): "weights",
    ("coalesced_collectives.py", ""): "communication",
    ("stage3.py", "_create_fp16_partitions_with_defragmentation"): "weights",
    ("stage3.py", "_create_fp32_partitions"): "master",
    ("stage3.py", "_setup_for_real_optimizer"): "gradients",
    ("stage3.py", "initialize_optimizer_states"): "gradients",
    ("stage3.py", "partition_grads"): "gradients",
}
PACKAGES = {"torch": HOMES, "deepspeed": ENGINE}
# Behind these lies the program itself.
BORDERS = {
    ("module.py", "_call_impl"),
    ("module.py", "inner"),
    ("graph.py", "_engine_run_backward"),
    ("optimizer.py", "wrapper"),
}
KNOWN: dict[CodeType, Part | str | None] = {}
DEEP = 40


def origin() -> Part | None:
    """The part of the block that is being asked for, where somebody on the stack says it."""
    frame = sys._getframe(3)
    for _ in range(DEEP):
        code = frame.f_code
        if code not in KNOWN:
            KNOWN[code] = meaning(code)
        found = KNOWN[code]
        if found is not None:
            return None if found == "border" else found  # type: ignore[return-value]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def meaning(code: CodeType) -> Part | str | None:
    path = Path(code.co_filename)
    key = (path.name, code.co_name)
    for package, homes in PACKAGES.items():
        if package in path.parts:
            return (
                "border"
                if package == "torch" and key in BORDERS
                else homes.get(key, homes.get((path.name, "")))
            )
    return None


__all__ = ["origin"]
