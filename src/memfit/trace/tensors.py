"""Tensor and sequence parallelism by DTensor: torch's styles on the linear layers of a transformers
model, or transformers' own plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from memfit.errors import InputError
from memfit.strategy import TP

# The linear layers of a block by their last name: split by columns, by rows (transformers 5.23
# `base_model_tp_plan` of its models).
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "c_fc")
ROWS = ("o_proj", "out_proj", "down_proj", "fc2")


def cut(model: Any, tp: TP, mesh: Any, experts: int = 1) -> Any:
    """transformers' model with its matrices split over `mesh`."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    plain = tp.vocabulary and not tp.sequence and not tp.parallel_loss
    if tp.style == "transformers" or (tp.style == "auto" and plain and model.supports_tp_plan):
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.tensor_parallel import (
            apply_tensor_parallelism,
            get_kv_heads_per_rank,
        )

        paths = {name for name, _ in (*model.named_parameters(), *model.named_modules())}
        settings = DistributedConfig(
            tp_size=tp.size, fsdp_size=max(1, experts // tp.size), ep_size=experts
        )
        model.config.distributed_config, model._device_mesh = (
            settings,
            mesh,
        )  # where PEFT looks (peft 0.21 tuners/lora/model.py)
        plan = model._resolve_parallel_plans(settings)[0]
        divided(heads if get_kv_heads_per_rank(plan, heads, tp.size) is None else 0, tp.size)
        model = apply_tensor_parallelism(
            model, mesh, {name: kind for name, kind in plan.items() if name in paths}
        )  # a tied head has no own
        if config.tie_word_embeddings:
            model.tie_weights()
        return model
    from torch.distributed.tensor.parallel import parallelize_module

    divided(heads, tp.size)
    parallelize_module(model, mesh, dict(styles(model, tp)), src_data_rank=None)
    if config.tie_word_embeddings:
        model.tie_weights()
    return model


def named(model: Any, saved: Iterable[str]) -> Iterator[str]:
    """Which of these modules are, or hold, modules that the plan of a model names that was cut by
    it."""
    settings = getattr(model.config, "distributed_config", None)
    if settings is None:
        return
    plan = model._resolve_parallel_plans(settings)[0]
    paths = [path for path, _ in model.named_modules()]
    split = [path for path in paths if path in plan]
    for name in saved:
        copied = [path for path in paths if path.endswith(name)]
        if any(f"{path}.".startswith(f"{one}.") for path in split for one in copied):
            yield name


def divided(heads: int, ranks: int) -> None:
    if heads % ranks:
        message = f"{ranks} ranks do not divide {heads} key/value heads"
        raise InputError.one(message, where="use tp", hint="DTensor does not replicate heads")


def styles(model: Any, tp: TP) -> Iterator[tuple[str, Any]]:
    """Module path → style, as torchtitan lays a dense decoder out (models/llama3/parallelize.py;
    docs.pytorch.org TP tutorial)."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    between = Shard(1) if tp.sequence else Replicate()  # of what goes from block to block
    paths = {id(module): path for path, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if tp.vocabulary:
        yield (
            paths[id(embedding)],
            RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        )
        if head is not None:
            out = (
                {"output_layouts": Shard(-1), "use_local_output": False}
                if tp.parallel_loss
                else {"output_layouts": Replicate()}
            )
            yield paths[id(head)], ColwiseParallel(input_layouts=between, **out)
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if name in COLUMNS:
            yield path, ColwiseParallel()
        elif name in ROWS:
            yield path, RowwiseParallel(output_layouts=between)
        elif tp.sequence and "Norm" in type(module).__name__ and not re.search(r"[qk]_norm$", path):
            yield path, SequenceParallel()
        elif tp.sequence and name in ("self_attn", "attention"):
            gathered = {"hidden_states": Replicate()}
            yield (
                path,
                PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts=gathered,
                ),
            )
        elif tp.sequence and name == "mlp":
            yield (
                path,
                PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            )


__all__ = ["cut"]
