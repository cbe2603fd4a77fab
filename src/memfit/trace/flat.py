"""torch's FSDP1 around a model, as accelerate wraps one: every layer a unit with one flat
parameter, the rest with the root."""

from __future__ import annotations

from typing import Any

import torch
from memfit.strategy import FSDP
from memfit.trace import cuda

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "": None,
}  # of a policy; "" leaves them as they are


def wrapped(model: Any, fsdp: FSDP, groups: Any, layers: Any) -> Any:
    """What accelerate hands to torch (accelerate 1.15 accelerator.py prepare_model). The model is
    on the meta device, and stays there."""
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        FullyShardedDataParallel,
        MixedPrecision,
        ShardingStrategy,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    when = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST}
    mixed = None
    if fsdp.param_dtype or fsdp.reduce_dtype:
        param, reduce = DTYPES[fsdp.param_dtype], DTYPES[fsdp.reduce_dtype]
        mixed = MixedPrecision(param_dtype=param, reduce_dtype=reduce, buffer_dtype=param)
    policy: Any = (
        None if fsdp.wrap == "none" else ModuleWrapPolicy({type(layer) for layer in layers})
    )
    if fsdp.adapters == "units" and hasattr(model, "peft_config"):
        from peft.utils.other import fsdp_auto_wrap_policy

        policy = fsdp_auto_wrap_policy(model)
    ignored = (
        [one for name, one in model.named_modules() if name.endswith((".lora_A", ".lora_B"))]
        if fsdp.adapters == "ignored"
        else None
    )
    hybrid = isinstance(groups, tuple)
    strategies = {
        (True, False): ShardingStrategy.FULL_SHARD,
        (False, False): ShardingStrategy.SHARD_GRAD_OP,
        (True, True): ShardingStrategy.HYBRID_SHARD,
        (False, True): ShardingStrategy._HYBRID_SHARD_ZERO2,
    }
    return FullyShardedDataParallel(
        model,
        process_group=groups,
        sharding_strategy=strategies[fsdp.reshard, hybrid]
        if fsdp.shard
        else ShardingStrategy.NO_SHARD,
        auto_wrap_policy=policy,
        mixed_precision=mixed,
        backward_prefetch=when.get(fsdp.backward_prefetch),
        forward_prefetch=fsdp.forward_prefetch,
        use_orig_params=fsdp.orig_params,
        param_init_fn=lambda module: None,
        ignored_modules=ignored,
        cpu_offload=CPUOffload(offload_params=fsdp.offload),
    )


def widened(model: Any) -> Any:
    """What is trained becomes fp32 under mixed precision, as accelerate has it (accelerator.py
    prepare_model)."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in FullyShardedDataParallel.fsdp_modules(model):
        if (
            module._has_params
            and module._flat_param is not None
            and module._flat_param.requires_grad
        ):
            flat: Any = module._flat_param
            flat.data = flat.data.to(torch.float32)
            module._handle._orig_param_dtype = torch.float32
    return model


def answers() -> list[tuple[Any, str, Any]]:
    """FSDP1's names for what a GPU can do are those of CUDA, wherever the tensors truly lie; by
    addresses it tells storages apart."""
    from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle

    true_tensor, true_storage = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr

    def of_storage(self: Any) -> int:
        return (
            (self._cdata if self.nbytes() else 0)
            if self.device.type == "meta"
            else int(true_storage(self))
        )

    def of_tensor(self: torch.Tensor) -> int:
        if cuda.INSIDE.depth or not self.is_meta:
            return int(true_tensor(self))
        return (
            of_storage(self.untyped_storage())
            and of_storage(self.untyped_storage()) + self.storage_offset() * self.element_size()
        )

    return [
        (_FSDPDeviceHandle, "from_device", classmethod(lambda cls, device: torch.cuda)),
        (torch.Tensor, "data_ptr", of_tensor),
        (torch.UntypedStorage, "data_ptr", of_storage),
    ]


__all__ = ["answers", "widened", "wrapped"]
