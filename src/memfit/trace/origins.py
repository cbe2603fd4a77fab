"""Which blocks are there only because there are many ranks: known by the function of torch that asks for them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

from memfit.tape import Part

# (file, function or "" for all of them) -> part; torch 2.13. Gathered weights and what carries them there are communication.
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
FILES = {file for file, _ in HOMES}
# Behind these lies the program itself.
BORDERS = {("module.py", "_call_impl"), ("module.py", "inner"), ("graph.py", "_engine_run_backward"), ("optimizer.py", "wrapper")}
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
    if "torch" not in path.parts or (path.name not in FILES and key not in BORDERS):
        return None
    return "border" if key in BORDERS else HOMES.get(key, HOMES.get((path.name, "")))


__all__ = ["origin"]
