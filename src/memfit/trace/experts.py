"""Experts spread over ranks by transformers' own plan (transformers 5.23
distributed/expert_parallel.py): which rank holds which, how tokens get there, and how many come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memfit.errors import InputError, Problem
from memfit.job import Job
from memfit.parallel.expert.check import PLANNED, planned
from memfit.strategy import Strategy


def refusals(job: Job, strategy: Strategy) -> Iterator[Problem]:
    """What of experts the trace does not run."""
    assert strategy.ep is not None
    yield from planned(job, strategy, strategy.ep)
    if job.version("transformers") < PLANNED:
        message = "a trace of expert parallelism needs transformers 5.23"
        yield Problem(message=message, where="use ep", hint="use an environment that has it")


def mesh_of(strategy: Strategy, device: str) -> Any:
    """The same ranks once more, as experts see them: neighbours hold other experts, `efsdp` ones
    the same (distributed/utils.py `initialize_distributed_mesh`); None where nothing is spread."""
    if strategy.size("ep") == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    replicas, shards = strategy.size("ddp"), strategy.within // strategy.size("ddp")
    sizes = (replicas, shards // strategy.size("ep"), strategy.size("ep"))
    return init_device_mesh(device, sizes, mesh_dim_names=("ddp", "efsdp", "ep"))


def named(strategy: Strategy, experts: Any) -> tuple[float, dict[str, str]]:
    """How uneven the rows are, and what the groups of that mesh are for."""
    if experts is None or strategy.ep is None:
        return 0.0, {}
    return strategy.ep.imbalance, {
        experts.get_group(name).group_name: name for name in ("efsdp", "ep")
    }


def spread(model: Any, mesh: Any, experts: Any, way: str) -> Any:
    """transformers' own plan, as `from_pretrained(distributed_config=...)` applies it."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    if not model.ep_plan:
        message = f"transformers has no expert parallel plan for `{model.config.model_type}`"
        raise InputError.one(message, where="use ep", hint="remove it")
    plan = model._expand_parallel_plan(model.ep_plan)
    return apply_expert_parallelism(model, experts["ep"], mesh["tp"], plan, ep_implementation=way)


def sharded(model: Any, ranks: int, experts: Any, given: dict[str, Any]) -> None:
    """Each layer's experts are a unit over the ranks that hold the same ones (distributed/fsdp.py
    `apply_fully_sharded_data_parallelism`)."""
    from torch.distributed.fsdp import fully_shard

    same = experts["ddp", "efsdp"] if experts["ddp"].size() > 1 else experts["efsdp"]
    for module in [one for one in model.modules() if getattr(one, "_is_expert_parallel", False)]:
        fully_shard(module, reshard_after_forward=True, **{**given, "mesh": same})
        module.set_gradient_divide_factor(float(ranks))
        if experts["efsdp"].size() > 1:
            module.set_force_sum_reduction_for_comms(True)


__all__ = ["mesh_of", "named", "refusals", "sharded", "spread"]
